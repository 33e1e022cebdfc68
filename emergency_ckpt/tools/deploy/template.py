"""Templates of manifests: objects of YAML with ``${NAME}`` in their texts.

The placeholders are filled in the parsed objects, not in the text: a value with a newline or a
quote stays a value, whatever it says. A text that is one placeholder becomes its value, a list's
items take its place in a list, and without a value the field goes.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import yaml

from emergency_ckpt.core.wording import printable
from emergency_ckpt.errors import ConfigError
from emergency_ckpt.extras.event_log.log_writer import LOG_BYTES
from emergency_ckpt.tools.deploy.gke_job import job_problems, job_values

Manifest = dict[str, Any]
_PLACEHOLDER = re.compile(r"\$\{([A-Z_]+)\}")
_DIGEST = re.compile(r"\S+@sha256:[0-9a-f]{64}")
_OPTIONS = {"RESTART_AGENT_IMAGE": "--restart-agent-image"}
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
    log_in_ram = _value_of(template, "ECKPT_EVENT_LOG").startswith("/ramdisk")
    problems = job_problems(args, LOG_BYTES if log_in_ram else 0)
    values = {} if problems else job_values(args)
    wanted = {word for part in _texts(template) for word in _PLACEHOLDER.findall(part)}
    problems += [] if problems else _missing(wanted, values, name)
    if not problems:
        objects = [_filled(manifest, values) for manifest in template]
        problems = [*_grace_problems(objects), *_privilege_problems(objects)]
        if not problems:
            return objects
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


def _missing(wanted: set[str], values: Mapping[str, Any], name: str) -> list[str]:
    problems = [
        f"{name} has the placeholder ${{{word}}}, which stands for nothing; there are"
        f" {', '.join(sorted(values))}"
        for word in sorted(wanted - values.keys())
    ]
    problems += [
        f"{name} needs {_OPTIONS[word]}"
        for word in sorted(wanted & _OPTIONS.keys())
        if values[word] is None
    ]
    problems += [
        f"{option} is given, and {name} has no place for it"
        for word, option in _OPTIONS.items()
        if word not in wanted and values[word] is not None
    ]
    return problems


def _filled(part: Any, values: Mapping[str, Any]) -> Any:
    if isinstance(part, dict):
        fields: Manifest = {}
        for key, before in part.items():
            value = _filled(before, values)
            if value is not None and (value != {} or before == {}):
                fields[_filled(key, values)] = int(value) if key in _NUMBERS else value
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
            for container in [*part.get("initContainers", []), *part["containers"]]:
                yield part, container
        for value in part.values():
            yield from _containers(value)
    elif isinstance(part, list):
        for item in part:
            yield from _containers(item)


def _environ(container: Manifest) -> dict[str, str]:
    return {entry["name"]: str(entry.get("value", "")) for entry in container.get("env", [])}


def _value_of(objects: Sequence[Manifest], variable: str) -> str:
    environs = (_environ(container) for part in objects for _, container in _containers(part))
    return next((environ[variable] for environ in environs if variable in environ), "")


def _grace_problems(objects: Sequence[Manifest]) -> list[str]:
    problems: list[str] = []
    for pod, container in (pair for part in objects for pair in _containers(part)):
        text = _environ(container).get("ECKPT_PREEMPTION_GRACE_S")
        left_s = pod.get("terminationGracePeriodSeconds", 30)
        if text is not None and float(text) + _GRACE_MARGIN_S > left_s:
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


def _text(dumper: yaml.SafeDumper, data: str) -> yaml.ScalarNode:
    style = "|" if "\n" in data else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", data, style=style)


_Dumper.add_representer(str, _text)
