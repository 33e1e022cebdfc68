"""Settings: one table in ``settings``; validation, agreement and documents follow from it.

1. ``settings`` declares each setting once: name, type, default, traits and meaning. ``table`` reads
   the declarations as rows. ``Config.shared_settings`` makes texts of those that must be equal on
   all processes.
2. ``validation`` finds every fault of a config: of each value alone by its row, then of several
   together; of policy objects too, which ``policies`` turns into plans.
3. ``keywords``, which type checkers read, and ``docs/configuration.md`` are written from the table;
   axlearn's face has a field for each row.

No library validates: a row is judged by one comparison for each kind of value, and with msgspec,
attrs or pydantic the texts of the faults and the rules between settings would remain to be written.
"""

from emergency_ckpt.config.settings import Config, OrbaxFace, run_id_of
from emergency_ckpt.config.table import settings_table

__all__ = ["Config", "OrbaxFace", "run_id_of", "settings_table"]
