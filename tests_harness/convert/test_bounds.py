"""Time and memory are linear in the bytes of a file, with small constants, whatever they say.

CPU time and memory are those of a process of its own; its limits are twice what the docs promise.
"""

import os
import random
from pathlib import Path
from typing import BinaryIO

import pytest
import torch

from harness.convert import CheckpointError, conversion, convert, write
from harness.convert.read import Checkpoint
from harness.convert.unpickle import unpickle

from .checkpoint_matrix import same
from .hostile import Converter, Cost, num_bytes, sweep, too_much
from .hostile_files import FILES
from .opcodes import DICT, beside, dumped, program, tensor, zipped


@pytest.fixture(scope="module")
def converter(tmp_path_factory: pytest.TempPathFactory) -> Converter:
    process = Converter(tmp_path_factory.mktemp("converter"))
    yield process
    process.close()


def check(converter: Converter, path: Path, suffix: str = ".pt") -> Cost:
    """Assert that a file is converted or refused in bounded time, and executes nothing."""
    cost = converter.convert(path, suffix)
    assert not cost.forbidden
    assert not cost.result.startswith("TRACEBACK"), cost.result
    assert "\n" not in cost.result
    assert not too_much(cost, 2 * num_bytes(path)), cost
    return cost


@pytest.mark.parametrize("name", FILES)
def test_a_file_costs_what_its_bytes_explain(
    name: str, converter: Converter, tmp_path: Path
) -> None:
    path = FILES[name](tmp_path, 100_000, random.Random(name))
    for suffix in (".pt", ".safetensors") if name.startswith(("views", "expanded")) else (".pt",):
        check(converter, path, suffix)


@pytest.mark.slow
@pytest.mark.parametrize("name", FILES)
def test_a_megabyte_costs_what_its_bytes_explain(
    name: str, converter: Converter, tmp_path: Path
) -> None:
    check(converter, FILES[name](tmp_path, 1_000_000, random.Random(name)))


def test_random_hostile_files(capsys: pytest.CaptureFixture[str]) -> None:
    assert sweep(200, seed=1) == 0, capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("wrap", [program, beside])
def test_ten_megabytes_of_nested_lists(wrap: object, converter: Converter, tmp_path: Path) -> None:
    body = b"]" * 5_000_000 + b"a" * 4_999_999
    assert check(converter, zipped(tmp_path / "a", wrap(body))).mib < 1_000


def test_an_expanded_view_is_written_as_what_it_is(tmp_path: Path) -> None:
    """Half a billion elements, all of them one."""
    torch.save({"a": torch.ones(1).expand(1 << 29)}, tmp_path / "in.ckpt")
    convert(tmp_path / "in.ckpt", tmp_path / "out.pt")
    assert (tmp_path / "out.pt").stat().st_size < 2_000
    loaded = torch.load(tmp_path / "out.pt")["a"]
    assert (loaded.shape, loaded.stride(), loaded[-1]) == ((1 << 29,), (0,), 1)


def test_an_expansion_is_refused_up_to_a_limit_that_can_be_raised(tmp_path: Path) -> None:
    tensor = torch.arange(3.0)[:, None].expand(3, 10_000_000)
    torch.save({"a": tensor}, tmp_path / "in.ckpt")
    output = tmp_path / "out.safetensors"
    with pytest.raises(CheckpointError, match=r"0\.1 GB would be .* --max-expansion allows more"):
        convert(tmp_path / "in.ckpt", output)
    assert os.listdir(tmp_path) == ["in.ckpt"]
    convert(tmp_path / "in.ckpt", output, max_expansion=100_000)
    from safetensors.torch import load_file

    assert same(load_file(output)["a"], tensor)


@pytest.mark.parametrize(
    "make",
    [
        lambda x: x.unfold(0, 7, 2),  # windows that overlap
        lambda x: x.as_strided((5, 5), (1, 1)),
        lambda x: x.as_strided((4, 30), (100, 2))[:, :, None].expand(4, 30, 9),
        lambda x: x.reshape(100, 100)[:, ::3].expand(2, 100, 34),
        lambda x: x[:0].expand(5, 0),
        lambda x: x[:1].expand(3, 1, 1, 1),
    ],
)
@pytest.mark.parametrize("dtype", ["keep", "float16"])
def test_views_that_repeat_elements_keep_their_bits(
    make: object, dtype: str, tmp_path: Path
) -> None:
    views = {"a": make(torch.arange(10_000.0) / 9), "b": torch.ones(3)}
    torch.save(views, tmp_path / "in.ckpt")
    convert(tmp_path / "in.ckpt", tmp_path / "out.pt", dtype=dtype)
    wanted = torch.float16 if dtype == "float16" else torch.float32
    for name, loaded in torch.load(tmp_path / "out.pt").items():
        assert same(loaded, views[name].to(wanted))


def test_elements_that_overlap_have_no_place_in_safetensors(tmp_path: Path) -> None:
    torch.save({"a": torch.arange(99.0).unfold(0, 7, 2)}, tmp_path / "in.ckpt")
    with pytest.raises(
        CheckpointError, match=r"a: its elements overlap in memory, which only a \.pt"
    ):
        convert(tmp_path / "in.ckpt", tmp_path / "out.safetensors")


def test_many_views_with_gaps_are_kept_as_they_lie(tmp_path: Path) -> None:
    """All columns of a matrix: one by one they would be larger, and slow to copy."""
    matrix = torch.rand(300, 300)
    columns = {f"{i}": matrix[:, i] for i in range(300)}
    torch.save(columns, tmp_path / "in.ckpt")
    convert(tmp_path / "in.ckpt", tmp_path / "out.pt")
    loaded = torch.load(tmp_path / "out.pt")
    assert all(same(loaded[name], column) for name, column in columns.items())
    assert loaded["0"].untyped_storage().data_ptr() == loaded["9"].untyped_storage().data_ptr()


def test_a_flipped_byte_in_any_copy_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Views that are compared together, and those that are gathered."""
    matrix = torch.rand(40, 50)
    views = {"rows": matrix[3:9], "row": matrix[5], "turned": torch.rand(9, 9).t()}
    views |= {"gaps": torch.rand(99)[::3], "wide": torch.rand(5)[:, None].expand(5, 7)}
    torch.save(views, tmp_path / "in.ckpt")
    convert(tmp_path / "in.ckpt", tmp_path / "out.pt")
    with Checkpoint(tmp_path / "out.pt") as written:
        places = {(t.record.offset, t.record.num_bytes) for t in written.root.values()}
    content = (tmp_path / "out.pt").read_bytes()
    for offset, size in places:
        for at in (0, size // 2, size - 1):

            def write_pt(file: BinaryIO, *arguments: object, position: int = offset + at) -> None:
                write.write_pt(file, *arguments)
                file.flush()
                os.pwrite(file.fileno(), bytes([content[position] ^ 1]), position)

            monkeypatch.setitem(conversion._WRITERS, ".pt", write_pt)
            with pytest.raises(CheckpointError, match="not written as it is in the source"):
                convert(tmp_path / "in.ckpt", tmp_path / "out.pt", force=True)


def test_long_values_are_passed_over(tmp_path: Path) -> None:
    """What is beside the weights may be large, and is not read."""
    state = {"state_dict": {"a": torch.ones(2)}, "notes": "x" * 200_000, 7: b"y" * 200_000}
    torch.save(state, tmp_path / "in.ckpt")
    convert(tmp_path / "in.ckpt", tmp_path / "out.pt")
    assert torch.load(tmp_path / "out.pt").keys() == {"a"}
    with (tmp_path / "text").open("w+b") as file:
        file.write(b"\x80\x02" + dumped("x" * 200_000) + b"\x85.")
        file.seek(0)
        ((text,),) = [unpickle(file)]
    assert text.name == "a long text"


@pytest.mark.parametrize("name", ["{:x}", "net.layers.{}.self_attention.module.query.weight"])
@pytest.mark.parametrize(
    "options", [{}, {"pickle_protocol": 5}, {"_use_new_zipfile_serialization": False}]
)
def test_many_honest_names_are_no_repetition(
    name: str, options: dict[str, object], tmp_path: Path
) -> None:
    """Scalars with short names and an average beside them: each has the fewest bytes."""
    state = {name.format(i): torch.tensor(float(i)) for i in range(5_000)}
    for root in (state, {"state_dict": state, "state_dict_ema": state}):
        torch.save(root, tmp_path / "in.ckpt", **options)
        before = Checkpoint(tmp_path / "in.ckpt")
        report = convert(tmp_path / "in.ckpt", tmp_path / "out.pt", dry_run=True)
        assert len(report.tensors) == 5_000
        with before:
            assert before.budget.left > 100 * 5_000


def test_shared_layers_are_named_as_often_as_they_occur(tmp_path: Path) -> None:
    layer = torch.nn.Linear(2, 2)
    network = torch.nn.Sequential(*[torch.nn.Sequential(layer, layer)] * 100)
    torch.save(network, tmp_path / "in.ckpt")
    convert(tmp_path / "in.ckpt", tmp_path / "out.pt")
    assert torch.load(tmp_path / "out.pt").keys() == network.state_dict().keys()


def test_the_measure_would_notice(converter: Converter, tmp_path: Path) -> None:
    """A gigabyte of tensors takes longer than its pickle explains."""
    data = b"\x80\x02" + DICT + dumped("a") + tensor() + b"u."
    assert converter.convert(zipped(tmp_path / "a", data)).result == "converted"
    assert too_much(Cost("converted", [], 1.5, 0), 1_000)
    assert too_much(Cost("converted", [], 0, 150), 1_000_000)
    assert not too_much(Cost("converted", [], 1.9, 120), 1_000_000)
