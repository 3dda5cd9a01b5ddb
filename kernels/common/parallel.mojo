"""Parallel loops of CPU kernels.

A launch list runs them on the threads of PyTorch's OpenMP team, as many as PyTorch takes: two teams would fight for the
cores, since either one's threads keep turning for a while when a loop has ended. A graph that MAX compiled has MAX's
(runner/graph_entries.mojo).
"""

from std.atomic import Atomic
from std.builtin._coroutine import (
    AnyCoroutine,
    _coro_destroy_fn,
    _coro_resume_fn,
)
from std.ffi import _Global
from std.os import abort


@fieldwise_init
struct Team(ImplicitlyCopyable, Movable):
    """Threads that work together."""

    var start: Int
    """The address of GOMP_parallel, or of a function that does the same; 0 where there are no threads."""
    var threads: Int


def _no_team() -> Team:
    return Team(0, 0)


comptime TEAM = _Global["torch_max_team", _no_team]
"""The team of the launch list that runs now. There is one for the process, whatever library asks."""

comptime GRAPH_TEAM = _Global["torch_max_graph_team", _no_team]
"""The team of graphs that MAX compiled, used while no launch list runs."""

comptime Body = def(Int) thin abi("C") -> None
comptime Start = def(Int, Int, UInt32, UInt32) thin abi("C") -> None
"""The entry of libgomp that starts a team, which LLVM's and Intel's runtimes have beside their own. It takes the body,
the body's argument, the number of threads and flags."""


def _team() -> Team:
    try:
        var team = TEAM.get_or_create_ptr()[]
        return team if team.start != 0 else GRAPH_TEAM.get_or_create_ptr()[]
    except:
        return _no_team()


def worker_count() -> Int:
    """Returns the number of threads that CPU work may be split over, at least one.
    """
    var team = _team()
    return max(1, team.threads if team.start != 0 else 1)


comptime GRAIN_SIZE = 16384
"""Elements below which another thread costs more than it gives."""


def workers_for(
    elements: Int, most: Int = Int.MAX, grain: Int = GRAIN_SIZE
) -> Int:
    """Returns the number of threads that pay for so many elements: at least one, at most `most`, each with `grain`
    elements or more."""
    return max(1, min(min(worker_count(), most), elements // grain))


def sync_parallelize[Task: def(Int) raises -> None](task: Task, count: Int):
    """Runs task(0) to task(count - 1), on several threads where there are; returns when all have ended. An error of a
    task ends the process.

    Only a coroutine carries a closure to another thread. A thread alone runs one too, so that a task is compiled once.
    """
    var threads = min(worker_count(), count)
    var next = Atomic[Int64](0)

    @no_inline
    @__parameter
    def work():
        while True:
            var number = Int(next.fetch_add(1))
            if number >= count:
                return
            try:
                task(number)
            except error:
                _end(error)

    @always_inline
    @__parameter
    __async def share():
        work()

    var shares = _Shares()
    for _ in range(threads):
        var each = share()
        each._set_noop_callback()
        shares.waiting.append(each^._take_handle())
    shares.run()


@no_inline
def _end(error: Error):
    abort(String(error))


struct _Shares(Movable):
    """The shares of a task that a team's threads take, one each."""

    var waiting: List[AnyCoroutine]
    var begun: Atomic[Int64]

    def __init__(out self):
        self.waiting = List[AnyCoroutine]()
        self.begun = Atomic[Int64](0)

    @no_inline
    def run(mut self):
        """Runs the waiting coroutines and frees them."""
        var team = _team()
        var threads = len(self.waiting)
        if threads <= 1 or team.start == 0:
            for number in range(threads):
                _coro_resume_fn(self.waiting[number])
        else:
            var body: Body = _take_share
            var start = team.start
            Pointer(to=start).unsafe_bitcast[Start]()[](
                Pointer(to=body).unsafe_bitcast[Int]()[],
                Int(Pointer(to=self)),
                UInt32(threads),
                0,
            )
        # A team may have fewer threads than asked for: what was not taken goes unused.
        for number in range(threads):
            _coro_destroy_fn(self.waiting[number])


def _take_share(address: Int) abi("C"):
    ref shares = MutPointer[_Shares, MutUntrackedOrigin](
        unsafe_from_address=address
    )[]
    _coro_resume_fn(shares.waiting[Int(shares.begun.fetch_add(1))])
