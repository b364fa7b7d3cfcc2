"""What can go wrong in a demo.

DemoError
├── InputError          a file or a number that was asked for cannot be used
│   ├── TranscriptError     a file of no accepted format, or with a line that does not fit its format
│   └── SessionError        sessions of the size asked for cannot be made
└── EngineError         an engine did not start, broke off, or answered with an error; ends with its last log lines
"""


class DemoError(Exception):
    """The demo cannot go on; the message says why, for people."""


class InputError(DemoError):
    """A file or a number that was asked for cannot be used."""


class TranscriptError(InputError):
    """A file of none of the accepted formats, or with a line that does not fit its format. Names file and line."""


class SessionError(InputError):
    """Sessions of the size asked for cannot be made."""


class EngineError(DemoError):
    """The engine did not start, broke off, answered with an error, or cannot be reached. Says what it answered."""
