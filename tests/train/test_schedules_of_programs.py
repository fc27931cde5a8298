"""Kernels and messages as they are read off a compiled program."""

import pytest

from decent_jax.train import hlo

# Two messages, of 32 and 8 bytes, around three kernels; laid out as XLA prints a program.
PROGRAM = """HloModule jit_step, is_scheduled=true

%fused (p: f32[8]) -> f32[8] {
  ROOT %n = f32[8]{0} negate(%p)
}

ENTRY %main (x: f32[8], m: bf16[4,2], w: bf16[2,16]) -> f32[8] {
  %x = f32[8]{0} parameter(0)
  %m = bf16[4,2]{1,0} parameter(1)
  %w = bf16[2,16]{1,0} parameter(2)
  %send = (f32[8]{0}, f32[8]{0}) collective-permute-start(%x), channel_id=1
  %late = bf16[4]{0} bitcast(%m)
  %product = bf16[4,16]{1,0} fusion(%m, %w), kind=kCustom, calls=%g, \
metadata={op_name="jit(step)/forward_backward/dot"}, backend_config={"kind":"__triton_gemm"}
  %b = (bf16[4]{0}, bf16[4]{0}) collective-permute-start(%late), channel_id=2
  %k = f32[8]{0} fusion(%x), kind=kLoop, calls=%fused, metadata={op_name="jit(step)/update/neg"}
  %bdone = bf16[4]{0} collective-permute-done(%b)
  %done = f32[8]{0} collective-permute-done(%send)
  ROOT %r = f32[8]{0} fusion(%k, %done), kind=kLoop, calls=%f2
}
"""


def test_kernels_and_their_bytes():
    found = hlo.entry(PROGRAM)
    assert [one.name for one in found] == ["send", "product", "b", "k", "bdone", "done", "r"]
    product, kernel = found[1], found[3]
    assert (product.read, product.written) == (2 * (8 + 32), 2 * 64)
    assert product.flops == 2 * 4 * 2 * 16
    assert (kernel.read, kernel.written, kernel.flops) == (32, 32, 0)
    assert kernel.scope == "jit(step)/update/neg"
    assert found[6].read == 64


def test_messages_beside_kernels_and_loops():
    assert hlo.windows(hlo.entry(PROGRAM)) == [
        hlo.Window("collective-permute", 2, 4, 8),
        hlo.Window("collective-permute", 0, 5, 32),
    ]
    loop = "  %l = (f32[8]) while(%t), condition=%c, body=%b2\n  %bdone"
    assert hlo.outline(hlo.entry(PROGRAM.replace("  %bdone", loop))) == (
        "2 collective-permute-start, loop, 2 collective-permute-done"
    )


# As XLA prints a step for TPUs of two slices; the numbers are cycles of the gradient.
ON_TPUS = """HloModule jit_step, is_scheduled=true

%sum (a: f32[], b: f32[]) -> f32[] {
  ROOT %add = f32[] add(%a, %b)
}

%inner (p: f32[8]) -> f32[8] {
  ROOT %all = f32[8]{0} all-reduce(%p), to_apply=%sum
}

%body (p: (f32[8])) -> (f32[8]) {
  %f = f32[8]{0} fusion(%p), calls=%sum, backend_config={"window_config":{"estimated_cycles":"5"}}
  ROOT %t = (f32[8]{0}) tuple(%f)
}

ENTRY %main (x: f32[8]) -> f32[8] {
  %x = f32[8]{0:T(256)S(1)} parameter(0)
  %token = token[] after-all()
  %s = (f32[8]{0}, u32[]{:S(2)}, token[]) send(%x, %token), channel_id=3, is_host_transfer=true
  %f0 = f32[8]{0} fusion(%x), calls=%sum, metadata={op_name="jit(step)/forward_backward/mul"}, \
backend_config={"window_config":{"estimated_cycles":"60"}}
  %r = (f32[8]{0}, u32[]{:S(2)}, token[]) recv(%token), channel_id=4, is_host_transfer=true
  %w = (f32[8]{0}) while(%t0), condition=%c, body=%body, \
metadata={op_name="jit(step)/forward_backward/while"}, \
backend_config={"known_trip_count":{"n":"8"}}
  %sd = token[] send-done(%s), channel_id=3, is_host_transfer=true
  %rd = (f32[8]{0}, token[]) recv-done(%r), channel_id=4, is_host_transfer=true
  ROOT %m = f32[8]{0} fusion(%x), calls=%inner, metadata={op_name="jit(step)/update/psum"}
}
"""


def test_what_crosses_slices_is_a_message_and_a_collective_in_a_kernel_is_one_too():
    found = hlo.entry(ON_TPUS)
    sends, receives, fused = hlo.windows(found)
    assert (sends.kind, receives.kind, fused.kind) == ("send", "recv", "all-reduce")
    assert (sends.nbytes, receives.nbytes) == (32, 0) and fused.start == fused.done
    assert hlo.kinds([sends, receives, sends]) == "2 send, 1 recv"


def test_the_share_of_the_gradient_that_runs_beside_messages():
    """60 cycles, and a loop of 8 turns with 5 each: the receive starts after 60% of 100."""
    found = hlo.overlap(hlo.entry(ON_TPUS), lambda one: one.cycles)
    assert (found.first, found.last, found.least) == (0.0, 0.6, pytest.approx(0.4))
    assert [one.kind for one in found.exposed] == ["recv", "all-reduce"]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("collective-permute-start(%x)", "collective-shuffle-start(%x)"),
        ("collective-permute-start(%x)", "remote-dma(%x)"),
        ("%k = f32[8]{0} fusion(%x)", '%k = f32[8] custom-call(%x), custom_call_target="ncclSend"'),
        ("collective-permute-done(%send)", "collective-permute-done(%gone)"),
        ("%k = f32[8]{0} fusion(%x)", "%k = f32[8]{0} Fusion!(%x)"),
        ("ENTRY %main", "%main"),
    ],
)
def test_an_unknown_form_is_an_error_and_no_hidden_message(old, new):
    assert old in PROGRAM
    with pytest.raises(ValueError):
        hlo.windows(hlo.entry(PROGRAM.replace(old, new)))


def test_a_program_without_messages_has_no_overlap():
    program = "\n".join(line for line in PROGRAM.splitlines() if "permute" not in line)
    with pytest.raises(ValueError, match="no message"):
        hlo.overlap(hlo.entry(program), lambda one: one.read)
