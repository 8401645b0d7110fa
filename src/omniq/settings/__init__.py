"""Every setting of omniq: arguments, environment and TOML, merged once and validated once.

`Settings(...)` uses its arguments only. `Settings.load(...)` also reads the environment and files;
the first of these that has a value wins:

    an argument, OMNIQ_<NAME>, omniq.toml, [tool.omniq] in pyproject.toml, the default

Both files are those of the project's folder: the current folder, or the first above it that has one
of them or `.git`. Paths in them are relative to that folder, as is the default `base_dir`. A file
that OMNIQ_CONFIG names takes the place of both. A file that was found and not named is refused if
another user could have written it: settings choose what a worker runs. An empty environment variable
counts as unset, but that of a key is an error: it would turn off what the key is for.

- `settings`: the values, and how they are merged.
- `rules`: the values that each setting accepts.
- `sources`: the environment and the files.
- `places`: which files and folders other users cannot change.
"""

from omniq.settings.rules import QueueSettings as QueueSettings
from omniq.settings.rules import RetryPolicy as RetryPolicy
from omniq.settings.settings import DEFAULT_FOLDER as DEFAULT_FOLDER
from omniq.settings.settings import Settings as Settings
from omniq.settings.sources import CONFIG_VARIABLE as CONFIG_VARIABLE
