"""Progress bars: shown for slow loops on a terminal, never in a pipe, and removed at the end."""

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
    """A terminal on which every loop counts as slow."""
    stream = Terminal()
    watch(monkeypatch, stream)
    monkeypatch.setattr(module, "DELAY", 0.0)
    return stream


def watch(monkeypatch: pytest.MonkeyPatch, stream: io.StringIO | None) -> None:
    """Replace the module's standard error by a stream; `sys.stderr` belongs to pytest."""
    monkeypatch.setattr(module, "sys", types.SimpleNamespace(stderr=stream, modules=sys.modules))


def last_line(stream: io.StringIO) -> str:
    """The final text of the terminal's line: a carriage return overwrites the text before it."""
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


def test_nothing_is_shown_if_standard_error_is_no_terminal(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = io.StringIO()
    for stream in (pipe, None):
        watch(monkeypatch, stream)
        with bars():
            assert list(progress(range(3), "rollout")) == [0, 1, 2]
    assert pipe.getvalue() == ""


def test_a_notebook_shows_bars_without_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    stream, shell = io.StringIO(), types.SimpleNamespace(kernel=None)
    watch(monkeypatch, stream)
    monkeypatch.setattr(module, "DELAY", 0.0)
    monkeypatch.setitem(sys.modules, "IPython", types.SimpleNamespace(get_ipython=lambda: shell))
    with bars():
        list(progress(range(3), "rollout"))
    assert "rollout" in stream.getvalue()


def test_no_bar_outside_a_scope_or_when_turned_off(terminal: Terminal) -> None:
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
    # The traceback still references the loop here.
    assert caught.tb is not None
    assert "rollout" in terminal.getvalue()
    assert last_line(terminal).strip() == ""
    assert threading.active_count() == threads
    output = terminal.getvalue()
    list(progress(range(3), "outside"))
    assert terminal.getvalue() == output


def test_steps_outside_a_loop_are_counted(terminal: Terminal) -> None:
    with bars(), counter("trace", 4) as step:
        step()
        time.sleep(0.11)
        step()
    assert "2/4" in terminal.getvalue()
    assert last_line(terminal).strip() == ""


def test_items_are_consumed_one_by_one() -> None:
    drawn: list[int] = []

    def source() -> object:
        for item in range(5):
            drawn.append(item)
            yield item

    loop = progress(source(), "rollout", total=5)
    assert (next(loop), drawn) == (0, [0])
