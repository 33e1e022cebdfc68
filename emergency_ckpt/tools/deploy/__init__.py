"""Manifests of a job on GKE, from a template with placeholders.

1. ``gke_job`` names every fault of a description at once, and has the values of the placeholders.
2. ``template`` fills a template, and names what is wrong with the rest of the template.

Guaranteed: the ramdisk of a description without faults holds the slots of its state. Not
guaranteed: that a cluster has the nodes, the quota or the versions that a manifest needs; nothing
here asks one.
"""
