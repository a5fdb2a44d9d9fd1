"""The one exception of this package: something a user caused and can mend, said in words for that user."""


class IngestError(ValueError):
    """An input, option or directory that cannot be used; the message names the value and the remedy."""
