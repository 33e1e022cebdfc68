"""Manifests of a job on GKE, from a template with placeholders.

1. The options of ``eckpt plan --gke`` describe the job. Every fault of a description is named at
   once; the tables of GKE's machine types tell the hosts of a topology.
2. A template consists of objects of YAML with ``${NAME}`` in their texts. The placeholders are
   filled in the parsed objects, not in the text: a value with a newline or a quote stays a value,
   whatever it says, and is a text for each parser of YAML. A text that is one placeholder becomes
   its value, a list's items take its place in a list, and without a value the field goes.

Guaranteed: the ramdisk of a description without faults holds the slots of its state. Not
guaranteed: that a cluster has the nodes, the quota or the versions that a manifest needs; nothing
here asks one.
"""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import yaml

from emergency_ckpt.core.limits import NAME_PATTERN, SMALL_FILES_BYTES
from emergency_ckpt.core.wording import printable
from emergency_ckpt.errors import ConfigError
from emergency_ckpt.extensions import parse_placement
from emergency_ckpt.extras.event_log import LOG_BYTES
from emergency_ckpt.paths import dir_problems
from emergency_ckpt.tools.placement_study import GIB, process_ram

ACCELERATORS = {
    "v4": "tpu-v4-podslice",
    "v5e": "tpu-v5-lite-podslice",
    "v5p": "tpu-v5p-slice",
    "v6e": "tpu-v6e-slice",
    "tpu7x": "tpu7x",
}
"""Value of the node label ``cloud.google.com/gke-tpu-accelerator`` for each type."""

MACHINES = {
    "v4": {"ct4p-hightpu-4t": 4},
    "v5e": {"ct5lp-hightpu-4t": 4, "ct5lp-hightpu-1t": 1, "ct5lp-hightpu-8t": 8},
    "v5p": {"ct5p-hightpu-4t": 4},
    "v6e": {"ct6e-standard-4t": 4, "ct6e-standard-1t": 1, "ct6e-standard-8t": 8},
    "tpu7x": {"tpu7x-standard-4t": 4},
}
"""Chips of a host by machine type, for each TPU type; the first one is the default. A machine of 1
or 8 chips is a slice by itself."""

_MIB = 1 << 20
_CHIPS_OF_A_SHARED_SLICE = 4
_FLAT = ("v5e", "v6e")
"""The types whose topologies have two dimensions; those of the others have three."""
_TOPOLOGY = re.compile(r"[1-9][0-9]{0,3}(x[1-9][0-9]{0,3}){1,2}", re.ASCII)

_NAME_SUFFIX_CHARS = len("-slice-999-9999-abcde")
_LABEL_LIMIT_CHARS = 63
_NODE_POOL = "cloud.google.com/gke-nodepool"
_LABEL = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_SUBDOMAIN = re.compile(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?")


def job_values(args: argparse.Namespace) -> dict[str, str | list[str] | None]:
    """Return the values of the placeholders; None for what this job does not have.

    For a job without faults.
    """
    machines = MACHINES[args.tpu_type]
    machine = args.machine_type or next(iter(machines))
    chips = machines[machine]
    return {
        "NAME": args.name,
        "NAMESPACE": args.namespace,
        "IMAGE": args.image,
        # The kubelet makes "$" of "$$" in a command, and puts variables in the place of "$(NAME)".
        "PROGRAM": [argument.replace("$", "$$") for argument in args.program],
        "DIR": args.dir,
        "BUCKET": args.dir.removeprefix("gs://").partition("/")[0],
        "RUN_ID": args.run_id or args.name,
        "SECRET": args.secret,
        "SLICES": str(args.slices),
        "HOSTS": str(args.hosts),
        "PROCESSES": str(args.slices * args.hosts),
        "ACCELERATOR": ACCELERATORS[args.tpu_type],
        "TOPOLOGY": args.topology,
        # A topology may be had of several machine types: 2x4 is two hosts, or one.
        "MACHINE": machine,
        "CHIPS": str(chips),
        # JAX has a device for each of the two cores of a chip of tpu7x.
        "DEVICES": str(chips * (2 if args.tpu_type == "tpu7x" else 1)),
        # One slice is one node pool, and no other slice's pods go there. Slices of one host share
        # a pool: each takes all chips of its node.
        "POOL_LABEL": _NODE_POOL if args.hosts > 1 else None,
        "STATE_GIB": f"{args.state_bytes / GIB:.6g}",
        "HOST_STATE_MIB": f"{args.host_state_bytes / _MIB:.6g}",
        "RAMDISK": format_quantity(args.ramdisk_bytes),
        "RAMDISK_BYTES": str(args.ramdisk_bytes),
        "MEMORY": None if args.memory_bytes is None else format_quantity(args.memory_bytes),
        "PLACEMENT": args.placement,
        "KEEP_STEPS": str(args.local_keep_last_n),
        "RESTART_AGENT_IMAGE": args.restart_agent_image,
    }


def format_quantity(size_bytes: int) -> str:
    """Return a size as Kubernetes writes it: the shortest with a binary unit that is exact."""
    for power, prefix in reversed(tuple(enumerate("KMGTP", start=1))):
        if size_bytes % (1 << (10 * power)) == 0:
            return f"{size_bytes >> (10 * power)}{prefix}i"
    return str(size_bytes)


def _name_problems(args: argparse.Namespace) -> list[str]:
    problems = [*dir_problems(args.dir)] if args.dir else []
    longest = _LABEL_LIMIT_CHARS - _NAME_SUFFIX_CHARS
    if not _LABEL.fullmatch(args.name) or len(args.name) > longest:
        problems.append(
            f"--name {args.name!r} must be 1 to {longest} of a-z, 0-9 and -, and begin with a"
            " letter, because pods and their host names are called after it"
        )
    if not _LABEL.fullmatch(args.namespace) or len(args.namespace) > _LABEL_LIMIT_CHARS:
        problems.append(f"--namespace {args.namespace!r} is not a name of a namespace")
    if not args.secret:
        problems.append(
            "no secret: give --secret NAME of a Kubernetes Secret that has the run's secret under"
            " the key 'secret' (kubectl create secret generic NAME --from-file=secret=FILE)"
        )
    elif not _SUBDOMAIN.fullmatch(args.secret):
        problems.append(f"--secret {args.secret!r} is not a name of a Secret")
    if NAME_PATTERN.fullmatch(args.run_id or args.name) is None:
        problems.append(f"--run-id {args.run_id or args.name!r} must match {NAME_PATTERN.pattern}")
    if not args.program:
        problems.append("no program was given: write it after --")
    for option, image in (
        ("--image", args.image),
        ("--restart-agent-image", args.restart_agent_image or "-"),
    ):
        if not image or any(character.isspace() for character in image):
            problems.append(f"{option} {image!r} is not a name of an image")
    # The kubelet would put a variable in the place of "$(NAME)".
    if not re.fullmatch(r"gs://[a-z0-9][-a-z0-9_.]*(/[^\\*?\[\]\s$]+)", args.dir):
        problems.append(
            f"--dir {args.dir!r} must be a directory in a bucket, such as gs://bucket/run, without"
            " spaces and the characters \\ * ? [ ] $"
        )
    return problems


def _size_problems(args: argparse.Namespace, besides_bytes: int) -> list[str]:
    """Return the faults of the sizes. ``besides_bytes``: what else lies in a host's ramdisk."""
    problems = [
        f"{option} must be {least} to {most}, not {value}"
        for option, value, least, most in (
            ("--slices", args.slices, 1, 999),
            ("--hosts", args.hosts, 1, 9999),
            ("--local-keep-last-n", args.local_keep_last_n, 1, 64),
        )
        if not least <= value <= most
    ]
    if problems:
        return problems
    try:
        policy = parse_placement(args.placement)
    except ConfigError as error:
        return [*error.problems]
    ramdisk_bytes, host_bytes = args.ramdisk_bytes, args.host_state_bytes
    of_one = process_ram(
        policy,
        slices=args.slices,
        hosts_per_slice=args.hosts,
        state_bytes=args.state_bytes,
        host_state_bytes=host_bytes,
        local_keep_last_n=args.local_keep_last_n,
    )
    needed_bytes = of_one.bytes + SMALL_FILES_BYTES + besides_bytes
    log_text = f", and {format_quantity(besides_bytes)} of event log" if besides_bytes else ""
    if ramdisk_bytes < needed_bytes:
        problems.append(
            f"a ramdisk of {format_quantity(ramdisk_bytes)} is smaller than the saves need:"
            f" {format_quantity(needed_bytes)} on each host, for {of_one.slots} slots"
            f" of its part of {format_quantity(args.state_bytes)} with {args.placement}, each with"
            f" {args.slices} host states of {format_quantity(host_bytes)}{log_text}"
        )
    if args.memory_bytes is not None and args.memory_bytes <= ramdisk_bytes:
        problems.append(
            f"a memory limit of {format_quantity(args.memory_bytes)} must be more than the ramdisk,"
            f" {format_quantity(ramdisk_bytes)}: what a pod writes there counts as its memory"
        )
    return problems


def tpu_problems(tpu_type: str, machine_type: str | None, topology: str, hosts: int) -> list[str]:
    """Return the fault of a slice of ``hosts`` hosts; empty without one.

    A topology of the right number of dimensions may be one that nobody sells: the plan has no list
    of those that are sold, and the pods of such a slice wait for nodes.

    Args:
      machine_type: None for the default one of ``tpu_type``.
    """
    machines = MACHINES.get(tpu_type)
    if machines is None:
        return [f"--tpu-type must be one of {', '.join(MACHINES)}, not {tpu_type!r}"]
    name = machine_type or next(iter(machines))
    if name not in machines:
        return [
            f"--machine-type {name!r} is no machine with {tpu_type} chips: {', '.join(machines)}"
        ]
    example = "2x4" if tpu_type in _FLAT else "2x2x4"
    if not _TOPOLOGY.fullmatch(topology) or topology.count("x") != example.count("x"):
        return [f"--topology {topology!r} is no topology of {tpu_type}, such as {example}"]
    chips, chips_of_host = math.prod(map(int, topology.split("x"))), machines[name]
    is_alone = chips_of_host != _CHIPS_OF_A_SHARED_SLICE
    if chips % chips_of_host or (is_alone and chips != chips_of_host):
        alone = ", which are a slice by themselves" if is_alone else ""
        return [f"--topology {topology} has {chips} chips, and {name} has {chips_of_host}{alone}"]
    there = chips // chips_of_host
    if hosts == there:
        return []
    than = "more" if hosts > there else "fewer"
    return [
        f"--hosts {hosts} is {than} than the topology has: {topology} of {tpu_type} has {there}"
        f" hosts of {chips_of_host} chips, and each of them runs one process"
    ]


Manifest = dict[str, Any]
_PLACEHOLDER = re.compile(r"\$\{([A-Z_]+)\}")
_DIGEST = re.compile(r"\S+@sha256:[0-9a-f]{64}")
_NUMBERS = frozenset({"replicas", "parallelism", "completions"})
"""Fields that are numbers to Kubernetes, and whose values are placeholders."""
_GRACE_MARGIN_S = 5
"""Between the notice and the sync point: a process looks for notices once a second, then a step
ends. No kubelet waits for it beyond ``terminationGracePeriodSeconds``."""
_WIDTH_CHARS = 110


def filled(text: str, args: argparse.Namespace, name: str) -> list[Manifest]:
    """Return the objects of the template ``text`` for the options of ``eckpt plan --gke``.

    ConfigError lists every fault of the job, and of what the template says besides. ``name``: of
    the template, for messages.
    """
    template = objects_of(text, name)
    environs = [_environ(container) for part in template for _, container in _containers(part)]
    log_in_ram = any(e.get("ECKPT_EVENT_LOG", "").startswith("/ramdisk") for e in environs)
    _refuse(
        [
            *_name_problems(args),
            *tpu_problems(args.tpu_type, args.machine_type, args.topology, args.hosts),
            *_size_problems(args, LOG_BYTES if log_in_ram else 0),
        ]
    )
    values = job_values(args)
    _refuse(_placeholder_problems(template, values, name))
    objects = [_filled(manifest, values) for manifest in template]
    _refuse([*_grace_problems(objects), *_privilege_problems(objects)])
    return objects


def _refuse(problems: Sequence[str]) -> None:
    """Raise ConfigError with the problems, if there are any."""
    if problems:
        raise ConfigError(problems, target="the job on GKE")


def as_yaml(objects: Sequence[Manifest], comments: Sequence[str] = ()) -> str:
    """Return the objects as one YAML stream below ``comments``, one line each.

    A comment may quote a program's arguments. A newline in one would end the comment, and what
    follows would be manifests.
    """
    head = "".join(f"# {printable(line)}\n" for line in comments)
    return head + "".join(
        "---\n" + yaml.dump(manifest, Dumper=_Dumper, sort_keys=False, width=_WIDTH_CHARS)
        for manifest in objects
    )


def objects_of(text: str, name: str) -> list[Manifest]:
    """Return the objects of a YAML stream. ConfigError where the text is no such stream."""
    try:
        objects = [part for part in yaml.safe_load_all(text) if part is not None]
    except yaml.YAMLError as error:
        raise ConfigError([f"{name} is no YAML: {error}"], target="the template") from error
    if not objects or not all(isinstance(part, dict) and "kind" in part for part in objects):
        raise ConfigError([f"{name} has no objects of Kubernetes"], target="the template")
    return objects


def _placeholder_problems(
    template: Sequence[Manifest], values: Mapping[str, Any], name: str
) -> list[str]:
    words = {word for part in _texts(template) for word in _PLACEHOLDER.findall(part)}
    problems = [
        f"{name} has the placeholder ${{{word}}}, which stands for nothing; there are"
        f" {', '.join(sorted(values))}"
        for word in sorted(words - values.keys())
    ]
    has_place = "RESTART_AGENT_IMAGE" in words
    is_given = values["RESTART_AGENT_IMAGE"] is not None
    if has_place and not is_given:
        problems.append(f"{name} needs --restart-agent-image")
    if is_given and not has_place:
        problems.append(f"--restart-agent-image is given, and {name} has no place for it")
    return problems


def _filled(part: Any, values: Mapping[str, Any]) -> Any:
    if isinstance(part, dict):
        fields: Manifest = {}
        for key, before in part.items():
            value = _filled(before, values)
            if value is not None and (value != {} or before == {}):
                fields[_filled(key, values)] = _number(key, value) if key in _NUMBERS else value
        return fields
    if isinstance(part, list):
        items: list[Any] = []
        for item in part:
            value = _filled(item, values)
            items += value if isinstance(value, list) and isinstance(item, str) else [value]
        return items
    if not isinstance(part, str):
        return part
    whole = _PLACEHOLDER.fullmatch(part)
    if whole is not None:
        return values[whole[1]]
    return _PLACEHOLDER.sub(lambda match: values[match[1]], part)


def _number(key: str, value: Any) -> int:
    try:
        return int(value)
    except (TypeError, ValueError) as error:
        problem = f"{key} is {value!r}, which is no number"
        raise ConfigError([problem], target="the template") from error


def _texts(part: Any) -> Iterator[str]:
    if isinstance(part, dict):
        for key, value in part.items():
            yield from (*_texts(key), *_texts(value))
    elif isinstance(part, list):
        for item in part:
            yield from _texts(item)
    elif isinstance(part, str):
        yield part


def _containers(part: Any) -> Iterator[tuple[Manifest, Manifest]]:
    """Yield (pod spec, container) of every pod in an object."""
    if isinstance(part, dict):
        if "containers" in part:
            for container in [*(part.get("initContainers") or []), *(part["containers"] or [])]:
                yield part, container
        for value in part.values():
            yield from _containers(value)
    elif isinstance(part, list):
        for item in part:
            yield from _containers(item)


def _environ(container: Manifest) -> dict[str, str]:
    return {entry["name"]: str(entry.get("value", "")) for entry in container.get("env") or []}


def _grace_problems(objects: Sequence[Manifest]) -> list[str]:
    problems: list[str] = []
    for pod, container in (pair for part in objects for pair in _containers(part)):
        text = _environ(container).get("ECKPT_PREEMPTION_GRACE_S")
        left_s = pod.get("terminationGracePeriodSeconds", 30)
        if text is None:
            continue
        try:
            is_short = float(text) + _GRACE_MARGIN_S > left_s
        except ValueError:
            problems.append(f"ECKPT_PREEMPTION_GRACE_S {text!r} is no number of seconds")
            continue
        if is_short:
            problems.append(
                f"terminationGracePeriodSeconds {left_s} of the pod is less than"
                f" ECKPT_PREEMPTION_GRACE_S {text} and {_GRACE_MARGIN_S} s until a step ends"
            )
    return problems


def _privilege_problems(objects: Sequence[Manifest]) -> list[str]:
    """Return the privileged containers of a DaemonSet whose images a moved tag could change."""
    return [
        f"image {container['image']!r} of the privileged container {container['name']!r} must end"
        " with @sha256: and its digest"
        for manifest in objects
        if manifest["kind"] == "DaemonSet"
        for _, container in _containers(manifest)
        if container.get("securityContext", {}).get("privileged")
        and not _DIGEST.fullmatch(container["image"])
    ]


class _Dumper(yaml.SafeDumper):
    """Texts of several lines as they stand; equal parts written out, for those who read."""

    def ignore_aliases(self, data: object) -> bool:
        return True


_WORD = re.compile(r"[A-Za-z][-./\w]+", re.ASCII)
"""What may stand without quotes, unless PyYAML quotes it as a word of YAML 1.1, such as ``off``.

No YAML has a number that begins with a letter, and no version has words of two letters or more that
1.1 has not. All else is quoted, since parsers differ: kubectl's, not PyYAML's, reads ``1e-4`` as a
number and ``y`` as a truth value."""


def _text(dumper: yaml.SafeDumper, data: str) -> yaml.ScalarNode:
    style = None if _WORD.fullmatch(data) else "|" if "\n" in data else "'"
    return dumper.represent_scalar("tag:yaml.org,2002:str", data, style=style)


_Dumper.add_representer(str, _text)
