"""What a fusion reads of its parameters: literal computations, as XLA writes them."""

from pallas_kernels.hlo import parts_read

COMPUTATIONS = """HloModule jit_f

%add (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %sum = f32[] add(%x, %y)
}

%split (param_0: f32[8], param_1: f32[4,2,8]) -> (bf16[2,1], bf16[2,2]) {
  %param_1 = f32[4,2,8]{2,1,0} parameter(1), metadata={op_name="x"}
  %zero = f32[] constant(0)
  %reduce.1 = f32[2,8]{1,0} reduce(%param_1, %zero), dimensions={0}, to_apply=%add
  %param_0 = f32[8]{0} parameter(0)
  %scales = f32[2,8]{1,0} broadcast(%param_0), dimensions={1}
  %scaled = f32[2,8]{1,0} multiply(%reduce.1, %scales)
  %rounded = bf16[2,8]{1,0} convert(%scaled)
  %keys = bf16[2,1]{1,0} slice(%rounded), slice={[0:2], [0:1]}
  %values = bf16[2,2]{1,0} slice(%rounded), slice={[0:2], [1:3]}
  ROOT %both = (bf16[2,1]{1,0}, bf16[2,2]{1,0}) tuple(%keys, %values)
}

%looked_up (param_0: f32[8,4], param_1: s32[2]) -> f32[2,4] {
  %param_0 = f32[8,4]{1,0} parameter(0)
  %param_1 = s32[2]{0} parameter(1)
  %first = s32[1]{0} slice(%param_1), slice={[0:1]}
  %again = s32[2]{0} concatenate(%first, %param_1), dimensions={0}
  ROOT %rows = f32[2,4]{1,0} gather(%param_0, %again), offset_dims={1}
}
"""


def test_slices_need_what_they_keep():
    """Three of eight columns of all four parts; scales are few, and counted whole. What looks rows
    up is not known to need less than everything, and nothing is needed more than once."""
    found = parts_read(COMPUTATIONS)
    assert found["split"] == {0: 1.0, 1: 3 / 8}
    assert found["looked_up"] == {0: 1.0, 1: 1.0}
    assert found["add"] == {0: 1.0, 1: 1.0}
