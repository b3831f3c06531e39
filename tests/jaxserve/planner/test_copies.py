"""HLO as XLA writes it for TPUs, shortened."""

from jaxserve.planner.copies import Copy, copies

TEXT = """HloModule jit_step, is_scheduled=true

%copy_fusion (input: u8[48,4096]) -> u8[48,4096] {
  %input = u8[48,4096]{1,0:T(32,128)(4,1)} parameter(0)
  ROOT %copy.1 = u8[48,4096]{1,0:T(8,128)(4,1)} copy(%input)
}

%fused_computation (param_0: u8[48,4096], param_1: s32[]) -> u8[1,4096] {
  %param_0 = u8[48,4096]{1,0:T(32,128)(4,1)} parameter(0)
  %param_1 = s32[] parameter(1)
  %fusion.1 = u8[48,4096]{1,0:T(8,128)(4,1)} fusion(%param_0), kind=kLoop, calls=%copy_fusion
  ROOT %slice.1 = u8[1,4096]{1,0:T(8,128)(4,1)} dynamic-slice(%fusion.1, %param_1)
}

%bits (param: f8e4m3fn[64,768]) -> u8[64,768] {
  %param = f8e4m3fn[64,768]{1,0:T(32,128)(4,1)} parameter(0)
  ROOT %cast = u8[64,768]{1,0:T(32,128)(4,1)} bitcast-convert(%param)
}

%two_slices (param_2: u8[48,4096]) -> (u8[1,4096], u8[1,4096]) {
  %param_2 = u8[48,4096]{1,0:T(32,128)(4,1)} parameter(0)
  %fusion.2 = u8[48,4096]{1,0:T(8,128)(4,1)} fusion(%param_2), kind=kLoop, calls=%copy_fusion
  %slice.2 = u8[1,4096]{1,0:T(8,128)(4,1)} dynamic-slice(%fusion.2, %zero)
  ROOT %tuple.2 = (u8[1,4096]{1,0}, u8[1,4096]{1,0}) tuple(%slice.2, %slice.2)
}

%two_casts (a: f8e4m3fn[64,768], b: f8e4m3fn[64,768]) -> (u8[64,768], u8[64,768]) {
  %a = f8e4m3fn[64,768]{1,0:T(32,128)(4,1)} parameter(0)
  %b = f8e4m3fn[64,768]{1,0:T(32,128)(4,1)} parameter(1)
  %cast.a = u8[64,768]{1,0:T(32,128)(4,1)} bitcast-convert(%a)
  %cast.b = u8[64,768]{1,0:T(32,128)(4,1)} bitcast-convert(%b)
  ROOT %tuple.3 = (u8[64,768]{1,0}, u8[64,768]{1,0}) tuple(%cast.a, %cast.b)
}

%body (state: (u8[48,4096], bf16[8,4096])) -> (u8[48,4096], bf16[8,4096]) {
  %state = (u8[48,4096]{1,0}, bf16[8,4096]{1,0}) parameter(0)
  %stack = u8[48,4096]{1,0:T(32,128)(4,1)} get-tuple-element(%state), index=0
  %one = u8[1,4096]{1,0:T(8,128)(4,1)} fusion(%stack), kind=kLoop, calls=%fused_computation
  %two = (u8[1,4096]{1,0}, u8[1,4096]{1,0:T(8,128)(4,1)}) fusion(%stack), calls=%two_slices
  %both = (u8[64,768]{1,0}, u8[64,768]{1,0:T(8,128)(4,1)}) fusion(%w, %v), calls=%two_casts
  %turned = bf16[4096,8]{1,0:T(8,128)(2,1)} transpose(%rows), dimensions={1,0}
  %near = u8[48,4096]{1,0:T(32,128)(4,1)S(1)} copy(%stack)
}

ENTRY %main (weights: f8e4m3fn[4,64,768], more: f8e4m3fn[64,768]) -> bf16[8] {
  %weights = f8e4m3fn[4,64,768]{2,1,0:T(32,128)(4,1)} parameter(0)
  %more = f8e4m3fn[64,768]{1,0:T(32,128)(4,1)} parameter(1)
  %bitcast_convert_type.1 = u8[4,64,768]{2,1,0:T(32,128)(4,1)} bitcast-convert(%weights)
  %same = u8[256,768]{1,0:T(32,128)(4,1)} bitcast(%bitcast_convert_type.1)
  %in_bits = u8[64,768]{1,0:T(32,128)(4,1)} fusion(%more), kind=kLoop, calls=%bits
  %int4 = s4[64,768]{1,0:T(64,128)(8,1)} copy(%other)
  %loop = (u8[48,4096]{1,0}, bf16[8,4096]{1,0}) while(%state.1), condition=%until, body=%body
}
"""


def test_copies_of_weights():
    """Not those inside of a fusion that slices, nor one into memory on the core."""
    found = copies(TEXT, 24 * 1024)
    assert found == [
        Copy("both", 2 * 64 * 768),
        Copy("turned", 64 * 1024),
        Copy("bitcast_convert_type.1", 4 * 64 * 768),
        Copy("in_bits", 64 * 768),
        Copy("int4", 64 * 768 // 2),
    ]
    assert [copy.name for copy in copies(TEXT, 100_000)] == ["bitcast_convert_type.1"]


def test_activations_do_not_count():
    """As logits, which are larger than a layer's weights, where their layout changes."""
    found = copies(TEXT, 24 * 1024, apart=lambda shape: shape == (4096, 8))
    assert "turned" not in [copy.name for copy in found]
    assert len(found) == 4
