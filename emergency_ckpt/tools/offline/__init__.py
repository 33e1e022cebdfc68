"""A step outside of its job: checked and drained, through ``tier.StepReader``.

Without model code or accelerator.

1. ``draining`` writes the newest step in RAM into the persistent directory of its run.
2. ``check_places`` names what is damaged, in RAM and (``check_stored``) in storage.
3. ``survival`` says which hosts or slices would cost the newest step in RAM.

Guaranteed: every shard from RAM, and every box of which storage has a CRC32C, is compared with it;
a damaged copy is passed over for another one; ramdisks are only read, without their locks.

Not guaranteed: a step of a job that goes on saving may vanish meanwhile, which is an error then.
"""
