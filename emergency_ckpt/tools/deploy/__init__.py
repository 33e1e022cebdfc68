"""Manifests for the engines on which jobs run, each made from one typed description.

1. ``gke_job`` describes a job on GKE and names every fault of the description at once; ``tpus`` has
   the machine types and topologies.
2. ``trainer_pod`` makes the pod of one host, and ``jobset`` the JobSet of them; ``ramdisk_daemon``
   makes the DaemonSet that mounts the ramdisk, and ``access`` accounts and network policies.
3. ``manifests`` puts them together and writes YAML.

Guaranteed: the ramdisk of a description without faults holds the slots of its state; the processes
of a JobSet have the ids 0 to ``slices * hosts - 1``, each once. Not guaranteed: that a cluster has
the nodes, the quota or the versions that a manifest needs; nothing here asks one.
"""
