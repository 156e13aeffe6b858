"""Signals that ask to stop, in this process."""

import os
import signal

import pytest

from normscope.cli.stopping import stopping_between_chunks


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_asks_and_the_second_interrupts(number):
    before, told = signal.getsignal(number), []
    with stopping_between_chunks(told.append) as stopping:
        assert not stopping()
        os.kill(os.getpid(), number)
        assert stopping() and told == ["Finishing the batch; once more to stop at once."]
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), number)
    assert signal.getsignal(number) is before


def test_a_reader_that_the_signal_ended_as_well_does_not_break_the_batch():
    """``normscope capture … 2>&1 | tee log``: Ctrl-C goes to both, and the tee is gone first."""

    def say(sentence):
        raise RuntimeError("closed pipe")

    with stopping_between_chunks(say) as stopping:
        os.kill(os.getpid(), signal.SIGINT)
        assert stopping()
