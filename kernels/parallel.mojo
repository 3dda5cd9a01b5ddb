"""Parallel loops of CPU kernels.

A launch list runs them on the threads of PyTorch's OpenMP team, as many as PyTorch takes: two teams would fight for the
cores, since either one's threads keep turning for a while when a loop has ended. A graph that MAX compiled has MAX's.
"""

from std.atomic import Atomic
from std.builtin._coroutine import (
    AnyCoroutine,
    _coro_destroy_fn,
    _coro_resume_fn,
)
from std.ffi import _Global
from std.os import abort

import max.algorithm as max_algorithm
from max.runtime.asyncrt import parallelism_level


@fieldwise_init
struct Team(ImplicitlyCopyable, Movable):
    """The threads of a launch list."""

    var start: Int
    """The address of GOMP_parallel, 0 where MAX's threads work."""
    var threads: Int


def _no_team() -> Team:
    return Team(0, 0)


comptime TEAM = _Global["torch_max_team", _no_team]
"""One for the process, whatever library asks."""

comptime _Body = def(Int) thin abi("C") -> None
comptime _Start = def(Int, Int, UInt32, UInt32) thin abi("C") -> None
"""Of libgomp, and of LLVM's and Intel's runtimes beside their own: body, what it gets, threads, flags."""


def _team() -> Team:
    try:
        return TEAM.get_or_create_ptr()[]
    except:
        return _no_team()


def worker_count() -> Int:
    """Threads that CPU work may be split over, at least one."""
    var team = _team()
    return max(1, team.threads if team.start != 0 else parallelism_level(None))


def sync_parallelize[Task: def(Int) raises -> None](task: Task, count: Int):
    """Runs task(0) to task(count - 1), on several threads where there are; returns when all have ended. An error of a
    task ends the process."""
    var team = _team()
    if team.start == 0:
        max_algorithm.sync_parallelize(task, count)
        return
    var threads = min(team.threads, count)
    var next = Atomic[Int64](0)

    @always_inline
    def work() {mut next, imm}:
        while True:
            var number = Int(next.fetch_add(1))
            if number >= count:
                return
            try:
                task(number)
            except error:
                abort(String(error))

    if threads <= 1:
        work()
        return
    _on_team(work, team.start, threads)


struct _Shares(Movable):
    """What a team's threads take, one each. Only a coroutine carries a closure to another thread.
    """

    var waiting: List[AnyCoroutine]
    var begun: Atomic[Int64]

    def __init__(out self):
        self.waiting = List[AnyCoroutine]()
        self.begun = Atomic[Int64](0)


def _take_share(address: Int) abi("C"):
    ref shares = MutPointer[_Shares, MutUntrackedOrigin](
        unsafe_from_address=address
    )[]
    _coro_resume_fn(shares.waiting[Int(shares.begun.fetch_add(1))])


def _on_team[Work: def() -> None](work: Work, start: Int, threads: Int):
    """Runs `work` once on each of `threads`."""

    @always_inline
    @__parameter
    def call():
        work()

    @always_inline
    @__parameter
    __async def share():
        call()

    var shares = _Shares()
    for _ in range(threads):
        var each = share()
        each._set_noop_callback()
        shares.waiting.append(each^._take_handle())
    var body: _Body = _take_share
    var address = start
    Pointer(to=address).unsafe_bitcast[_Start]()[](
        Pointer(to=body).unsafe_bitcast[Int]()[],
        Int(Pointer(to=shares)),
        UInt32(threads),
        0,
    )
    # A team may have fewer threads than asked for: what was not taken goes unused.
    for number in range(threads):
        _coro_destroy_fn(shares.waiting[number])
