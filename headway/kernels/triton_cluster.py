"""Thread block clusters for Gluon kernels: a few programs that run side by side and write into each other's shared memory.

Programs that share a result (parts of K, splits of a row's keys) otherwise meet in the L2 cache: store, fence, count, read, one
trip after the other. In a cluster a part is sent into the shared memory of the program that wants it, and counts itself where
it arrives: a barrier of the whole cluster would bring a fence, which costs more than the sending. The order of a kernel:

1. ``cluster_buffer`` names the program's room, ``open_mailbox`` says how much will be sent to it; both before ``gdc_wait``.
2. ``cluster_wait``: all programs of the cluster run, so their mailboxes may be sent to: ``send2``, ``send4``.
3. ``wait_mailbox``: what was sent here can be read, by ``pull``. A program that is sent nothing may end.

Kernels with warps of different kinds call ``init_mailbox`` and ``arrive_alone`` instead of ``open_mailbox``, before the kinds
part; the warps that send call ``cluster_wait``.

A program that ends at once counts as having arrived, but nobody may send to it. Programs of a cluster are neighbours along the
first dimension of the grid, which must be a multiple of the cluster.

Triton 3.6 launches clusters only for tensors that it spreads over them itself, so the size is written into the PTX: a kernel
that is compiled for a cluster is launched as one whatever the launch says. PTX ISA, ``.reqnctapercluster``,
``barrier.cluster``, ``mapa``; CUDA C++ Programming Guide, distributed shared memory. Needs compute capability 9.0.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from headway.kernels import triton_stages as triton_stages  # the size is written into what it compiles


@gluon.constexpr_function
def room_asm(kind, size, remark):
    """PTX for an address that ``with_rooms`` fills in."""
    return f"mov.u32 $0, global_smem; add.u32 $0, $0, room_{kind}_{size}; // {remark}"


@gluon.jit
def shared_room(BYTES: gl.constexpr):
    """int32: where ``BYTES`` of this program's shared memory begin, a multiple of 16, behind all that Triton allocates.

    Once in a kernel, which allocates shared memory in Triton, too.
    """
    ASM: gl.constexpr = room_asm("own", BYTES, "of one program")
    return gl.inline_asm_elementwise(ASM, "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def cluster_buffer(BYTES: gl.constexpr, CLUSTER: gl.constexpr):
    """``shared_room`` at the same place in each program of a cluster. Once in a kernel.

    ``CLUSTER``: programs a cluster, 2, 4 or 8.
    """
    ASM: gl.constexpr = room_asm("shared", BYTES, f"cluster of {CLUSTER} programs")
    return gl.inline_asm_elementwise(ASM, "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def cluster_wait():
    """Return when every thread of the cluster has arrived; their writes are visible."""
    gl.inline_asm_elementwise(
        "barrier.cluster.wait.acquire.aligned; mov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.constexpr_function
def arrive_asm(others):
    """PTX for the arrival of the warps that run what is not specialised."""
    return (
        "fence.mbarrier_init.release.cluster; barrier.cluster.arrive.relaxed.aligned; mov.u32 $0, 0; "
        f"// threads from {others} on have arrived"
    )


@gluon.jit
def arrive_alone(OTHERS: gl.constexpr):
    """Say that this program runs and that its barriers are there; for kernels with warps of different kinds.

    Those from thread ``OTHERS`` on arrive when they start: they never come by. ``cluster_wait`` is for the warps that need it.
    """
    ASM: gl.constexpr = arrive_asm(OTHERS)
    gl.inline_asm_elementwise(ASM, "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def place_in(rank, at):
    """int32: where ``at`` (int32, bytes) of program ``rank``'s shared memory lies for the whole cluster; to be added to."""
    return gl.inline_asm_elementwise(
        "mapa.shared::cluster.u32 $0, $1, $2;", "=r,r,r", [at, rank], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def open_mailbox(box, expected):
    """Let ``expected`` (int32) bytes be sent to what lies 16 bytes behind ``box``, and say that this program runs.

    The 16 bytes hold a barrier that counts what has come. ``cluster_wait`` comes before anybody sends.
    """
    gl.inline_asm_elementwise(
        "{ .reg .pred one; .reg .b32 id; mov.u32 id, %tid.x; setp.eq.u32 one, id, 0; "
        "@one mbarrier.init.shared::cta.b64 [$1], 1; @one fence.mbarrier_init.release.cluster; "
        "@one mbarrier.arrive.expect_tx.shared::cta.b64 _, [$1], $2; "
        "barrier.cluster.arrive.relaxed.aligned; mov.u32 $0, 0; }",
        "=r,r,r", [box, expected], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def init_mailbox(box, expected):
    """``open_mailbox`` for kernels with warps of different kinds: ``arrive_alone`` says that this program runs."""
    gl.inline_asm_elementwise(
        "{ .reg .pred one; .reg .b32 id; mov.u32 id, %tid.x; setp.eq.u32 one, id, 0; "
        "@one mbarrier.init.shared::cta.b64 [$1], 1; @one fence.mbarrier_init.release.cluster; "
        "@one mbarrier.arrive.expect_tx.shared::cta.b64 _, [$1], $2; mov.u32 $0, 0; }",
        "=r,r,r", [box, expected], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def send2(places, boxes, values, keep):
    """Send ``values`` (float32) where ``place_in`` says, two neighbours at a time and 8 bytes aligned, and have ``boxes``, the
    mailboxes there, count them; not where ``keep`` (int32) is 0 for the first of the two.

    All have the same shape; each thread's values come in twos along the fastest dimension. Nothing else is ordered by it, so
    there is no fence to pay for.
    """
    gl.inline_asm_elementwise(
        "{ .reg .pred some; setp.ne.b32 some, $8, 0; "
        "@some st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [$2], {$6, $7}, [$4]; "
        "mov.u32 $0, 0; mov.u32 $1, 0; }",
        "=r,=r,r,r,r,r,f,f,r,r", [places, boxes, values, keep], dtype=gl.int32, is_pure=False, pack=2,
    )  # fmt: skip


@gluon.jit
def send4(places, boxes, values):
    """``send2`` of four neighbours at a time, 16 bytes aligned, and of all. What several threads hold is sent as often."""
    gl.inline_asm_elementwise(
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [$4], {$12, $13, $14, $15}, [$8]; "
        "mov.u32 $0, 0; mov.u32 $1, 0; mov.u32 $2, 0; mov.u32 $3, 0; ",
        "=r,=r,=r,=r,r,r,r,r,r,r,r,r,f,f,f,f", [places, boxes, values], dtype=gl.int32, is_pure=False, pack=4,
    )  # fmt: skip


@gluon.jit
def wait_mailbox(box):
    """Return when all that is expected has come. Once."""
    gl.inline_asm_elementwise(
        "{ .reg .pred all; again: mbarrier.try_wait.parity.shared::cta.b64 all, [$1], 0; @!all bra again; mov.u32 $0, 0; }",
        "=r,r", [box], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def pull(at):
    """float32: what lies at ``at`` (int32, bytes) in this program's shared memory."""
    return gl.inline_asm_elementwise("ld.shared.f32 $0, [$1];", "=f,r", [at], dtype=gl.float32, is_pure=False, pack=1)


@gluon.jit
def pull4(at):
    """``pull`` of four neighbours at a time, 16 bytes aligned."""
    return gl.inline_asm_elementwise(
        "ld.shared.v4.f32 {$0, $1, $2, $3}, [$4];", "=f,=f,=f,=f,r,r,r,r", [at], dtype=gl.float32, is_pure=False, pack=4
    )
