"""Bars: silent when piped, when quick and when turned off; shown on a slow terminal; gone afterwards."""

import io
import sys
import threading
import time
import types

import pytest

from unilinattn import progress as module
from unilinattn.progress import bars, counter, progress


class Terminal(io.StringIO):
    """Standard error of a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """A terminal to whom every loop is slow."""
    stream = Terminal()
    watch(monkeypatch, stream)
    monkeypatch.setattr(module, "DELAY", 0.0)
    return stream


def watch(monkeypatch: pytest.MonkeyPatch, stream: io.StringIO | None) -> None:
    """Put a stream where the module looks for standard error; pytest keeps its own in `sys`."""
    monkeypatch.setattr(module, "sys", types.SimpleNamespace(stderr=stream, modules=sys.modules))


def last_line(stream: io.StringIO) -> str:
    """What the terminal's line shows in the end: what a carriage return leaves is overwritten."""
    return stream.getvalue().rpartition("\r")[2]


def test_a_slow_loop_shows_its_name_and_count_and_leaves_no_line(terminal: Terminal) -> None:
    with bars():
        assert list(progress([1, 2, 3], "rollout")) == [1, 2, 3]
    assert "rollout" in terminal.getvalue()
    assert "/3" in terminal.getvalue()
    assert last_line(terminal).strip() == ""


def test_a_quick_loop_shows_nothing(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "DELAY", 60.0)
    with bars():
        list(progress(range(1000), "rollout"))
    assert terminal.getvalue() == ""


def test_nothing_is_shown_where_standard_error_is_no_terminal(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe = io.StringIO()
    for stream in (pipe, None):
        watch(monkeypatch, stream)
        with bars():
            assert list(progress(range(3), "rollout")) == [0, 1, 2]
    assert pipe.getvalue() == ""


def test_a_notebook_shows_bars_though_it_has_no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    stream, shell = io.StringIO(), types.SimpleNamespace(kernel=None)
    watch(monkeypatch, stream)
    monkeypatch.setattr(module, "DELAY", 0.0)
    monkeypatch.setitem(sys.modules, "IPython", types.SimpleNamespace(get_ipython=lambda: shell))
    with bars():
        list(progress(range(3), "rollout"))
    assert "rollout" in stream.getvalue()


def test_no_bar_without_leave_to_show_one(terminal: Terminal) -> None:
    list(progress(range(3), "outside of any scope"))
    with bars(False):
        list(progress(range(3), "turned off"))
        with bars(True):
            list(progress(range(3), "turned off further out"))
    assert terminal.getvalue() == ""
    with bars(True):
        with bars(False):
            pass
        list(progress(range(3), "on again"))
    assert "on again" in terminal.getvalue()


def test_one_thread_does_not_turn_on_the_bars_of_another(terminal: Terminal) -> None:
    with bars():
        other = threading.Thread(target=lambda: list(progress(range(3), "elsewhere")))
        other.start()
        other.join()
    assert terminal.getvalue() == ""


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_an_exception_leaves_no_line_and_no_thread(terminal: Terminal, error: type[BaseException]) -> None:
    threads = threading.active_count()
    with pytest.raises(error) as caught, bars():
        for item in progress(range(5), "rollout"):
            if item == 2:
                raise error("stop here")
    # The traceback still holds the loop here.
    assert caught.tb is not None
    assert "rollout" in terminal.getvalue()
    assert last_line(terminal).strip() == ""
    assert threading.active_count() == threads
    shown = terminal.getvalue()
    list(progress(range(3), "outside"))
    assert terminal.getvalue() == shown


def test_steps_that_are_no_loop(terminal: Terminal) -> None:
    with bars(), counter("trace", 4) as step:
        step()
        time.sleep(0.11)
        step()
    assert "2/4" in terminal.getvalue()
    assert last_line(terminal).strip() == ""


def test_items_come_one_by_one() -> None:
    drawn: list[int] = []

    def source() -> object:
        for item in range(5):
            drawn.append(item)
            yield item

    loop = progress(source(), "rollout", total=5)
    assert (next(loop), drawn) == (0, [0])
