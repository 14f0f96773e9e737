"""The commands of `locks`, one module each; locks.cli lists them. Modules that load torch are imported when a
command runs, so that `--help` answers at once."""


class CommandError(Exception):
    """What a user can put right: one line that names the value, what is allowed and, after it, the next step."""
