"""A signal ends a command with its own exit code, whatever a library makes of the handler's exception."""

import signal

import pytest

from ingest.signals import ends_on_signals


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_library_that_changes_the_exception(number, code, capsys):
    @ends_on_signals()
    def command():
        try:
            signal.raise_signal(number)
        except SystemExit:
            raise RuntimeError("Query interrupted") from None

    before = signal.getsignal(number)
    with pytest.raises(SystemExit) as ended:
        command()
    assert ended.value.code == code
    assert f"stopped by {number.name}" in capsys.readouterr().err
    assert signal.getsignal(number) is before


def test_without_a_signal_an_error_stays_what_it_is():
    with pytest.raises(RuntimeError, match="of its own"), ends_on_signals():
        raise RuntimeError("of its own")
