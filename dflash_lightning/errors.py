"""The one exception for bad input: a single line that names the key or file line, and the cure."""


class UserError(ValueError):
    """Bad input from the user.

    The command line prints its message as one line, without traceback.
    """
