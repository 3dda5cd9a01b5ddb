"""The entry of the library that lends MAX's threads to kernels of graphs that MAX compiled.

It stands apart: the code for MAX's threads would take a second to compile in every library.
"""

import max.algorithm as max_algorithm
from max.gpu.host import DeviceContext
from max.runtime.asyncrt import parallelism_level

from ..common.library import Arguments
from ..common.parallel import GRAPH_TEAM, Body, Start, Team


def _start(body: Int, data: Int, threads: UInt32, flags: UInt32) abi("C"):
    """Calls `body` with `data` once for each of `threads`, as GOMP_parallel does.
    """
    var address = body

    def share(number: Int) raises {imm}:
        Pointer(to=address).unsafe_bitcast[Body]()[](data)

    max_algorithm.sync_parallelize(share, Int(threads))


def graph_team[
    target: StaticString
](mut arguments: Arguments, ctx: DeviceContext) raises:
    """Makes kernels of graphs that MAX compiled run on MAX's threads from now on.
    """
    var start: Start = _start
    ref team = GRAPH_TEAM.get_or_create_ptr()[]
    team = Team(
        Pointer(to=start).unsafe_bitcast[Int]()[], parallelism_level(None)
    )
