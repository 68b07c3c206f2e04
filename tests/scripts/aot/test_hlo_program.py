import pytest

from scripts.aot.hlo_program import HloProgram, Launch, type_bytes

KERNEL_CODE = 'backend_config={module = "%fake = f32[9999]{0} copy(%x) (((\\00kernel_7\\00"}'
PROGRAM = f"""HloModule jit_step, is_scheduled=true, entry_computation_layout={{(f32[64]{{0}})->f32[64]{{0}}}}

FileNames
1 "step.py"

StackFrames
1 {{file_location_id=1 parent_frame_id=1}}

%fused_copy (param_0: f32[64,8]) -> f32[64,8] {{
  %param_0 = f32[64,8]{{1,0}} parameter(0)
  %bitcast.1 = f32[8,64]{{0,1}} bitcast(%param_0)
  ROOT %transpose.1 = f32[64,8]{{1,0}} transpose(%bitcast.1), dimensions={{1,0}}
}}

%fused_add (param_1: f32[64,8]) -> f32[8,64] {{
  %param_1 = f32[64,8]{{1,0}} parameter(0)
  %transpose.2 = f32[8,64]{{1,0}} transpose(%param_1), dimensions={{1,0}}
  ROOT %add.1 = f32[8,64]{{1,0}} add(%transpose.2, %transpose.2)
}}

%fused_psum (param_2: bf16[16]) -> bf16[16] {{
  %param_2 = bf16[16]{{0}} parameter(0)
  ROOT %psum.1 = bf16[16]{{0}} all-reduce(%param_2), channel_id=1, to_apply=%sum
}}

%fused_kernel (param_3: f32[64,8]) -> f32[8] {{
  %param_3 = f32[64,8]{{1,0}} parameter(0)
  %slice.1 = f32[8]{{0}} bitcast(%param_3)
  ROOT %kernel.9 = f32[8]{{0}} custom-call(%slice.1), custom_call_target="mosaic_gpu_v2", {KERNEL_CODE}
}}

%sum (a: bf16[], b: bf16[]) -> bf16[] {{
  %a = bf16[] parameter(0)
  %b = bf16[] parameter(1)
  ROOT %sum.1 = bf16[] add(%a, %b)
}}

%inner_body (p.1: (s32[], f32[64,8])) -> (s32[], f32[64,8]) {{
  %p.1 = (s32[], f32[64,8]{{1,0}}) parameter(0)
  %get.1 = f32[64,8]{{1,0}} get-tuple-element(%p.1), index=1
  %copy.1 = f32[64,8]{{1,0}} copy(%get.1), metadata={{op_name="jit(step)/copy"}}
  ROOT %tuple.1 = (s32[], f32[64,8]{{1,0}}) tuple(%p.1, %copy.1)
}}

%inner_condition (p.2: (s32[], f32[64,8])) -> pred[] {{
  %p.2 = (s32[], f32[64,8]{{1,0}}) parameter(0)
  ROOT %compare.1 = pred[] fusion(%p.2), kind=kLoop, calls=%fused_add
}}

%body (p.3: (s32[], /*index=1*/f32[64,8])) -> (s32[], f32[64,8]) {{
  %p.3 = (s32[], f32[64,8]{{1,0}}) parameter(0)
  %fusion.1 = f32[8,64]{{1,0}} fusion(%p.3), kind=kLoop, calls=%fused_add
  ROOT %while.1 = (s32[], f32[64,8]{{1,0}}) while(%p.3), condition=%inner_condition, body=%inner_body
}}

%condition (p.4: (s32[], f32[64,8])) -> pred[] {{
  %p.4 = (s32[], f32[64,8]{{1,0}}) parameter(0)
  ROOT %compare.2 = pred[] fusion(%p.4), kind=kLoop, calls=%fused_add
}}

%long_branch (p.5: f32[64,8]) -> f32[64,8] {{
  %p.5 = f32[64,8]{{1,0}} parameter(0)
  %sort.1 = f32[64,8]{{1,0}} sort(%p.5), dimensions={{0}}, to_apply=%sum
  ROOT %kernel.1 = f32[64,8]{{1,0}} custom-call(%sort.1), custom_call_target="mosaic_gpu_v2", {KERNEL_CODE}
}}

%short_branch (p.6: f32[64,8]) -> f32[64,8] {{
  ROOT %p.6 = f32[64,8]{{1,0}} parameter(0)
}}

%called (p.7: f32[4]) -> f32[32] {{
  %p.7 = f32[4]{{0}} parameter(0)
  %gather-start = ((f32[4]{{0}}), f32[32]{{0}}) all-gather-start(%p.7), channel_id=1, dimensions={{0}}
  ROOT %gather-done = f32[32]{{0}} all-gather-done(%gather-start)
}}

ENTRY %main (host.1: f32[64,8], p.8: f32[64]) -> f32[64] {{
  %host.1 = f32[64,8]{{1,0:S(5)}} parameter(0), metadata={{op_name="state.host"}}
  %p.8 = f32[64]{{0}} parameter(1)
  %empty.1 = f32[64,8]{{1,0}} custom-call(), custom_call_target="AllocateBuffer"
  %copy-start.1 = (f32[64,8]{{1,0}}, f32[64,8]{{1,0:S(5)}}, u32[]) copy-start(%host.1)
  %copy-done.1 = f32[64,8]{{1,0}} copy-done(%copy-start.1)
  %fusion.2 = f32[64,8]{{1,0}} fusion(%copy-done.1), kind=kLoop, calls=%fused_copy
  %tuple.2 = (s32[], f32[64,8]{{1,0}}) tuple(%p.8, %fusion.2)
  %while.2 = (s32[], f32[64,8]{{1,0}}) while(%tuple.2), condition=%condition, body=%body, backend_config={{"known_trip_count":{{"n":"5"}}}}
  %branch.1 = f32[64,8]{{1,0}} conditional(%p.8, %fusion.2, %fusion.2), branch_computations={{%short_branch, %long_branch}}
  %call.1 = f32[32]{{0}} call(%p.8), to_apply=%called
  %fusion-start = ((bf16[16]{{0}}), bf16[16]{{0}}) fusion-start(%p.8), kind=kCustom, calls=%fused_psum
  %fusion-done = bf16[16]{{0}} fusion-done(%fusion-start)
  %fusion.9 = f32[8]{{0}} fusion(%p.8), kind=kCustom, calls=%fused_kernel
  %scatter.1 = f32[4]{{0}} reduce-scatter(%call.1), channel_id=1, to_apply=%sum
  ROOT %copy.2 = f32[64]{{0}} copy(%p.8)
}}
"""  # noqa: E501


@pytest.fixture(scope="module")
def program() -> HloProgram:
    return HloProgram.parse(PROGRAM)


def test_launches(program: HloProgram) -> None:
    """A loop, branch, call or asynchronous operation that is counted once too often or too rarely,
    a kernel that is taken for a fusion because XLA joined it with a slice.

    The outer loop runs five times; the inner one, of unknown length, counts once in each with its
    condition.
    """
    counts: dict[tuple[str, int], int] = {}
    for launch, times in program.launches():
        key = launch.kind, launch.num_bytes
        counts[key] = counts.get(key, 0) + times
    assert counts == {
        ("copy", 0): 1 + 1 + 5,
        ("fusion", 0): 1 + 5 * 2,
        ("sort", 0): 1,
        ("mosaic_gpu_v2", 0): 1 + 1,
        ("all-gather", 128): 1,
        ("all-reduce", 32): 1,
        ("reduce-scatter", 128): 1,
    }
    assert {loop.name: loop.trip_count for loop in program.loops()} == {
        "while.1": None,
        "while.2": 5,
    }
    assert [each.name for each in program.branches()] == ["branch.1"]


def test_copies(program: HloProgram) -> None:
    """A copy that is missed in a loop or a fusion, or a kernel's code that is read as HLO."""
    found = {each.name for each in program.copies(1)}
    assert found == {"copy.1", "copy.2", "copy-start.1", "transpose.1"}
    assert {each.name for each in program.copies(257)} == found - {"copy.2"}
    assert not list(program.copies(2049))


def test_instruction(program: HloProgram) -> None:
    """Attributes of a line that are lost, or that drag a kernel's code along."""
    lines = {each.name: each for each in program.instructions()}
    assert lines["host.1"].argument == "state.host"
    assert lines["p.8"].argument == "p.8"
    assert "\\00kernel_7\\00" in lines["kernel.1"].backend_config
    assert str(lines["copy.2"]) == "%copy.2 = f32[64]{0} copy(%p.8)"
    assert "kernel_7" not in str(lines["kernel.1"])
    kernels = [each for each, _ in program.launches() if each.kind == "mosaic_gpu_v2"]
    expected = [
        Launch("mosaic_gpu_v2", lines[name].origin, instruction=lines[name])
        for name in ("kernel.9", "kernel.1")
    ]
    assert sorted(kernels, key=str) == sorted(expected, key=str)


@pytest.mark.parametrize(
    ("type_", "expected"),
    [
        ("f32[64,128]{1,0:T(8,128)S(5)}", 64 * 128 * 4),
        ("bf16[]", 2),
        ("f8e4m3fn[3]{0}", 3),
        ("s4[3]{0}", 2),
        ("pred[5]{0}", 5),
        ("c64[2]{0}", 16),
        ("token[]", 0),
        ("(s32[2]{0}, /*index=1*/(u8[3]{0}, f64[0]{0}))", 11),
    ],
)
def test_type_bytes(type_: str, expected: int) -> None:
    """An element type whose size is read wrongly."""
    assert type_bytes(type_) == expected


def test_no_program() -> None:
    """A text that is no program, reported as one that does nothing."""
    with pytest.raises(ValueError, match="ENTRY"):
        HloProgram.parse("HloModule empty")
