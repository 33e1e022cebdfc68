"""A step outside of its job: compared, exported, drained, through ``tier.StepReader``.

Without model code or accelerator.

1. ``named_steps`` finds the step that a person names, in RAM, in storage or in a folder that Orbax
   wrote.
2. ``compare`` measures the differences of two steps, one box at a time.
3. ``export_step`` writes a step as a directory of plain Orbax; ``drain`` writes the newest step in
   RAM into the persistent directory of its run.
4. ``check_places`` names what is damaged, in RAM and (``check_stored``) in storage.
5. ``survival`` says which hosts or slices would cost the newest step in RAM.

Guaranteed: every shard from RAM, and every box of which storage has a CRC32C, is compared with it;
a damaged copy is passed over for another one; ramdisks are only read, without their locks.

Not guaranteed: a step of a job that goes on saving may vanish meanwhile, which is an error then.
"""
