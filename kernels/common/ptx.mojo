"""Thin names for the instructions of NVIDIA's GPUs that kernels are made of, most of them Hopper's.

Shared memory is addressed by 32-bit numbers here, as the instructions themselves do. Everything that touches
shared memory is inline assembly with side effects, so program order is kept between the copies, the barriers
and the ordinary accesses.
"""

from std.sys import _RegisterPackType
from std.sys._assembly import inlined_assembly
from std.sys.info import _accelerator_arch


def compiling_for_hopper() -> Bool:
    """Returns whether the accelerator that this compilation is for has these kernels' instructions.
    """
    comptime arch = _accelerator_arch()
    comptime if "90a" in arch and "gfx" not in arch:
        return True
    else:
        return False


@always_inline
def mbarrier_init(barrier: UInt32, arrivals: Int):
    inlined_assembly[
        "mbarrier.init.shared::cta.b64 [$0], $1;",
        NoneType,
        constraints="r,r,~{memory}",
    ](barrier, Int32(arrivals))


@always_inline
def fence_mbarrier_init():
    """Makes initialised barriers visible to the whole cluster and to the copy engine.
    """
    inlined_assembly[
        "fence.mbarrier_init.release.cluster;",
        NoneType,
        constraints="~{memory}",
    ]()


@always_inline
def fence_shared_writes():
    """Makes this thread's writes to shared memory visible to the tensor cores and the copy engine.
    """
    inlined_assembly[
        "fence.proxy.async.shared::cta;", NoneType, constraints="~{memory}"
    ]()


@always_inline
def mbarrier_expect(barrier: UInt32, bytes: Int):
    """Arrives once and announces the bytes that the copy engine will deliver in this phase.
    """
    inlined_assembly[
        "mbarrier.arrive.expect_tx.shared::cta.b64 _, [$0], $1;",
        NoneType,
        constraints="r,r,~{memory}",
    ](barrier, Int32(bytes))


@always_inline
def mbarrier_arrive(barrier: UInt32):
    inlined_assembly[
        "mbarrier.arrive.shared::cta.b64 _, [$0];",
        NoneType,
        constraints="r,~{memory}",
    ](barrier)


@always_inline
def mbarrier_arrive_remote(barrier: UInt32, block: UInt32):
    """Arrives on the barrier at the same shared address in another block of the cluster.

    Publishes nothing to it: a slot that was only read is given back. To release at the cluster's scope is a memory
    barrier of the whole device, and made a step three times as long.
    """
    inlined_assembly[
        """{
        .reg .b32 remote;
        mapa.shared::cluster.u32 remote, $0, $1;
        mbarrier.arrive.shared::cluster.b64 _, [remote];
        }""",
        NoneType,
        constraints="r,r,~{memory}",
    ](barrier, block)


@always_inline
def mbarrier_arrive_at(barrier: UInt32, remote: Bool, block: UInt32):
    """Arrives on the barrier here, or, if `remote`, at the same address in a block of the cluster: without a branch.
    """
    inlined_assembly[
        """{
        .reg .pred far;
        .reg .b32 there;
        setp.ne.u32 far, $1, 0;
        @far mapa.shared::cluster.u32 there, $0, $2;
        @far mbarrier.arrive.shared::cluster.b64 _, [there];
        @!far mbarrier.arrive.shared::cta.b64 _, [$0];
        }""",
        NoneType,
        constraints="r,r,r,~{memory}",
    ](barrier, UInt32(remote), block)


@always_inline
def mbarrier_wait(barrier: UInt32, parity: UInt32):
    """Waits until the phase of this parity is complete. The caller must know that the phase before it is: a barrier has
    one bit for its phase, so a wait for the next but one ends at once."""
    inlined_assembly[
        """{
        .reg .pred done;
        WAIT:
        mbarrier.try_wait.parity.shared::cta.b64 done, [$0], $1;
        @done bra DONE;
        bra WAIT;
        DONE:
        }""",
        NoneType,
        constraints="r,r,~{memory}",
    ](barrier, parity)


@always_inline
def named_barrier_sync(barrier: Int32, threads: Int32):
    inlined_assembly["bar.sync $0, $1;", NoneType, constraints="r,r,~{memory}"](
        barrier, threads
    )


@always_inline
def named_barrier_arrive(barrier: Int32, threads: Int32):
    inlined_assembly[
        "bar.arrive $0, $1;", NoneType, constraints="r,r,~{memory}"
    ](barrier, threads)


@always_inline
def elect_thread() -> Bool:
    """Returns whether this is the one thread that the hardware picks of a whole warp; tells the compiler that the
    others are idle, so that it issues copies without a loop over threads."""
    return (
        inlined_assembly[
            """{
            .reg .pred chosen;
            elect.sync _|chosen, 0xffffffff;
            selp.u32 $0, 1, 0, chosen;
            }""",
            UInt32,
            constraints="=r,~{memory}",
        ]()
        != 0
    )


@always_inline
def syncwarp():
    inlined_assembly[
        "bar.warp.sync 0xffffffff;", NoneType, constraints="~{memory}"
    ]()


@always_inline
def cluster_arrive():
    inlined_assembly[
        "barrier.cluster.arrive.release;", NoneType, constraints="~{memory}"
    ]()


@always_inline
def cluster_arrive_relaxed():
    """Arrives without waiting until this thread's writes, to device memory too, are there for others to see.
    """
    inlined_assembly[
        "barrier.cluster.arrive.relaxed;", NoneType, constraints="~{memory}"
    ]()


@always_inline
def cluster_wait():
    inlined_assembly[
        "barrier.cluster.wait.acquire;", NoneType, constraints="~{memory}"
    ]()


@always_inline
def cluster_block_rank() -> UInt32:
    return inlined_assembly[
        "mov.u32 $0, %cluster_ctarank;",
        UInt32,
        constraints="=r",
        has_side_effect=False,
    ]()


@always_inline
def load_cluster(shared: UInt32, block: UInt32) -> SIMD[DType.float32, 4]:
    """Reads 16 bytes at the same shared address in another block of the cluster.
    """
    # One piece: an address of another block must not leave the instructions that make and use it.
    var words = inlined_assembly[
        """{
        .reg .b32 remote;
        mapa.shared::cluster.u32 remote, $4, $5;
        ld.shared::cluster.v4.f32 {$0, $1, $2, $3}, [remote];
        }""",
        _RegisterPackType[Float32, Float32, Float32, Float32],
        constraints="=f,=f,=f,=f,r,r,~{memory}",
    ](shared, block)
    return SIMD[DType.float32, 4](words[0], words[1], words[2], words[3])


@always_inline
def store_cluster_counted(
    shared: UInt32,
    barrier: UInt32,
    block: UInt32,
    values: SIMD[DType.float32, 4],
):
    """Writes 16 bytes to the same shared address in another block of the cluster, and counts them on the barrier at the
    same address there. Whoever waits for that barrier sees them; no fence of the writer's is needed.
    """
    inlined_assembly[
        """{
        .reg .b32 there, counter;
        mapa.shared::cluster.u32 there, $0, $2;
        mapa.shared::cluster.u32 counter, $1, $2;
        st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [there], {$3, $4, $5, $6}, [counter];
        }""",
        NoneType,
        constraints="r,r,r,f,f,f,f,~{memory}",
    ](shared, barrier, block, values[0], values[1], values[2], values[3])


@always_inline
def launch_dependents():
    """Lets the next kernel's blocks come, if it was launched so, as soon as every block of this one has said this or
    ended."""
    inlined_assembly[
        "griddepcontrol.launch_dependents;", NoneType, constraints="~{memory}"
    ]()


@always_inline
def wait_for_prerequisites():
    """Waits until the kernels before, which let this one's blocks come early, have ended and their writes are there.
    """
    inlined_assembly[
        "griddepcontrol.wait;", NoneType, constraints="~{memory}"
    ]()


@always_inline
def made_here(value: Int32) -> Int32:
    """Returns the value, made before any barrier that follows: the compiler would rather make it where it is used.
    """
    return inlined_assembly[
        "mov.b32 $0, $1;", Int32, constraints="=r,r,~{memory}"
    ](value)


@always_inline
def wide_halves(pair: UInt32) -> SIMD[DType.float32, 2]:
    """Returns two float16 values as float32, converted where this stands and not before.
    """
    var words = inlined_assembly[
        """{
        .reg .b16 low, high;
        mov.b32 {low, high}, $2;
        cvt.f32.f16 $0, low;
        cvt.f32.f16 $1, high;
        }""",
        _RegisterPackType[Float32, Float32],
        constraints="=f,=f,r",
        has_side_effect=False,
    ](pair)
    return SIMD[DType.float32, 2](words[0], words[1])


@always_inline
def exchange_lanes(value: UInt32, distance: Int32) -> UInt32:
    """Returns the value of the lane whose number differs in the bits of `distance`; every lane of the warp takes part.
    """
    return inlined_assembly[
        "shfl.sync.bfly.b32 $0, $1, $2, 0x1f, 0xffffffff;",
        UInt32,
        constraints="=r,r,r",
    ](value, distance)


@always_inline
def release_registers[count: Int]():
    """Gives this warpgroup's registers above `count` for each thread back to the block's pool.
    """
    comptime text = "setmaxnreg.dec.sync.aligned.u32 " + String(count) + ";"
    inlined_assembly[text, NoneType, constraints="~{memory}"]()


@always_inline
def claim_registers[count: Int]():
    comptime text = "setmaxnreg.inc.sync.aligned.u32 " + String(count) + ";"
    inlined_assembly[text, NoneType, constraints="~{memory}"]()


@always_inline
def prefetch_tensor_map(tensor_map: UInt64):
    inlined_assembly[
        "prefetch.tensormap [$0];", NoneType, constraints="l,~{memory}"
    ](tensor_map)


@always_inline
def load_bulk(shared: UInt32, source: UInt64, bytes: Int32, barrier: UInt32):
    """Copies a run of device memory; both addresses and the length are multiples of 16 bytes.
    """
    inlined_assembly[
        (
            "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
            " [$0], [$1], $2, [$3];"
        ),
        NoneType,
        constraints="r,l,r,r,~{memory}",
    ](shared, source, bytes, barrier)


@fieldwise_init
struct Im2col(ImplicitlyCopyable, TrivialRegisterPassable):
    """The start of an im2col copy: a channel, a base pixel and a tap's offsets from there. Tensors of two spatial axes
    leave `d` out."""

    var channel: Int32
    var w: Int32
    var h: Int32
    var d: Int32
    var n: Int32
    var offsets: UInt32
    """Offsets along W (in the lowest bits), H and D: 8 bits each with two axes, 5 with three."""


@always_inline
def load_im2col(
    shared: UInt32, tensor_map: UInt64, barrier: UInt32, at: Im2col, deep: Bool
):
    """Copies pixels x channels of a channels-last tensor, walking the map's pixel box; `deep` ones have three spatial
    axes."""
    if deep:
        inlined_assembly[
            (
                "cp.async.bulk.tensor.5d.shared::cluster.global.im2col.mbarrier::complete_tx::bytes"
                " [$0], [$1, {$3, $4, $5, $6, $7}], [$2], {$8, $9, $10};"
            ),
            NoneType,
            constraints="r,l,r,r,r,r,r,r,h,h,h,~{memory}",
        ](
            shared,
            tensor_map,
            barrier,
            at.channel,
            at.w,
            at.h,
            at.d,
            at.n,
            UInt16(at.offsets & 31),
            UInt16(at.offsets >> 5 & 31),
            UInt16(at.offsets >> 10 & 31),
        )
    else:
        inlined_assembly[
            (
                "cp.async.bulk.tensor.4d.shared::cluster.global.im2col.mbarrier::complete_tx::bytes"
                " [$0], [$1, {$3, $4, $5, $6}], [$2], {$7, $8};"
            ),
            NoneType,
            constraints="r,l,r,r,r,r,r,h,h,~{memory}",
        ](
            shared,
            tensor_map,
            barrier,
            at.channel,
            at.w,
            at.h,
            at.n,
            UInt16(at.offsets & 255),
            UInt16(at.offsets >> 8 & 255),
        )


@always_inline
def load_im2col_multicast(
    shared: UInt32,
    tensor_map: UInt64,
    barrier: UInt32,
    at: Im2col,
    deep: Bool,
    blocks: UInt16,
):
    """Copies as `load_im2col` does, to the same shared address, and barrier, of every block in the mask.
    """
    if deep:
        inlined_assembly[
            (
                "cp.async.bulk.tensor.5d.shared::cluster.global.im2col.mbarrier::complete_tx::bytes.multicast::cluster"
                " [$0], [$1, {$3, $4, $5, $6, $7}], [$2], {$8, $9, $10}, $11;"
            ),
            NoneType,
            constraints="r,l,r,r,r,r,r,r,h,h,h,h,~{memory}",
        ](
            shared,
            tensor_map,
            barrier,
            at.channel,
            at.w,
            at.h,
            at.d,
            at.n,
            UInt16(at.offsets & 31),
            UInt16(at.offsets >> 5 & 31),
            UInt16(at.offsets >> 10 & 31),
            blocks,
        )
    else:
        inlined_assembly[
            (
                "cp.async.bulk.tensor.4d.shared::cluster.global.im2col.mbarrier::complete_tx::bytes.multicast::cluster"
                " [$0], [$1, {$3, $4, $5, $6}], [$2], {$7, $8}, $9;"
            ),
            NoneType,
            constraints="r,l,r,r,r,r,r,h,h,h,~{memory}",
        ](
            shared,
            tensor_map,
            barrier,
            at.channel,
            at.w,
            at.h,
            at.n,
            UInt16(at.offsets & 255),
            UInt16(at.offsets >> 8 & 255),
            blocks,
        )


@always_inline
def load_tile_2d(
    shared: UInt32, tensor_map: UInt64, barrier: UInt32, x: Int32, y: Int32
):
    inlined_assembly[
        (
            "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
            " [$0], [$1, {$3, $4}], [$2];"
        ),
        NoneType,
        constraints="r,l,r,r,r,~{memory}",
    ](shared, tensor_map, barrier, x, y)


@always_inline
def load_tile_2d_multicast(
    shared: UInt32,
    tensor_map: UInt64,
    barrier: UInt32,
    x: Int32,
    y: Int32,
    blocks: UInt16,
):
    """Copies as `load_tile_2d` does, to the same shared address, and barrier, of every block in the mask.
    """
    inlined_assembly[
        (
            "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster"
            " [$0], [$1, {$3, $4}], [$2], $5;"
        ),
        NoneType,
        constraints="r,l,r,r,r,h,~{memory}",
    ](shared, tensor_map, barrier, x, y, blocks)


@always_inline
def load_tile_3d(
    shared: UInt32,
    tensor_map: UInt64,
    barrier: UInt32,
    x: Int32,
    y: Int32,
    z: Int32,
):
    inlined_assembly[
        (
            "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
            " [$0], [$1, {$3, $4, $5}], [$2];"
        ),
        NoneType,
        constraints="r,l,r,r,r,r,~{memory}",
    ](shared, tensor_map, barrier, x, y, z)


@always_inline
def load_tile_4d(
    shared: UInt32,
    tensor_map: UInt64,
    barrier: UInt32,
    x: Int32,
    y: Int32,
    z: Int32,
    u: Int32,
):
    inlined_assembly[
        (
            "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
            " [$0], [$1, {$3, $4, $5, $6}], [$2];"
        ),
        NoneType,
        constraints="r,l,r,r,r,r,r,~{memory}",
    ](shared, tensor_map, barrier, x, y, z, u)


@always_inline
def load_tile_3d_multicast(
    shared: UInt32,
    tensor_map: UInt64,
    barrier: UInt32,
    x: Int32,
    y: Int32,
    z: Int32,
    blocks: UInt16,
):
    """Copies as `load_tile_3d` does, to the same shared address, and barrier, of every block in the mask.
    """
    inlined_assembly[
        (
            "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster"
            " [$0], [$1, {$3, $4, $5}], [$2], $6;"
        ),
        NoneType,
        constraints="r,l,r,r,r,r,h,~{memory}",
    ](shared, tensor_map, barrier, x, y, z, blocks)


@always_inline
def load_matrices[
    count: Int, turned: Bool = False
](shared: UInt32) -> SIMD[DType.uint32, count]:
    """Loads two or four 8 x 8 matrices of elements of two bytes: lane l names row l % 8 of matrix l / 8.
    """
    comptime assert count == 2 or count == 4
    comptime name = "ldmatrix.sync.aligned.m8n8.x" + String(count) + (
        ".trans" if turned else ""
    ) + ".shared.b16 "
    comptime if count == 4:
        var words = inlined_assembly[
            name + "{$0, $1, $2, $3}, [$4];",
            _RegisterPackType[UInt32, UInt32, UInt32, UInt32],
            constraints="=r,=r,=r,=r,r,~{memory}",
        ](shared)
        return rebind[SIMD[DType.uint32, count]](
            SIMD[DType.uint32, 4](words[0], words[1], words[2], words[3])
        )
    else:
        var words = inlined_assembly[
            name + "{$0, $1}, [$2];",
            _RegisterPackType[UInt32, UInt32],
            constraints="=r,=r,r,~{memory}",
        ](shared)
        return rebind[SIMD[DType.uint32, count]](
            SIMD[DType.uint32, 2](words[0], words[1])
        )


@always_inline
def store_matrices[
    transposed: Bool = False
](shared: UInt32, a: UInt32, b: UInt32, c: UInt32, d: UInt32):
    """Stores four 8x8 matrices of 16-bit elements; lane l names row l % 8 of matrix l / 8, or of its transpose.
    """
    comptime way = ".trans" if transposed else ""
    inlined_assembly[
        "stmatrix.sync.aligned.m8n8.x4"
        + way
        + ".shared.b16 [$0], {$1, $2, $3, $4};",
        NoneType,
        constraints="r,r,r,r,r,~{memory}",
    ](shared, a, b, c, d)
