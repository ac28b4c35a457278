import tracemalloc

import pytest

from harness.convert import CheckpointError
from harness.convert.names import Names


def renamed(*names: str, **options: object) -> dict[str, str]:
    return Names(names, **options).new


@pytest.mark.parametrize(
    "prefix",
    [
        "module",
        "_orig_mod",
        "module.module",
        "_orig_mod.module",
        "module._orig_mod.module",
        "_forward_module",
        "_fsdp_wrapped_module._checkpoint_wrapped_module",
    ],
)
def test_wrappers_are_stripped_in_any_order(prefix: str) -> None:
    names = {f"{prefix}.a.weight": "a.weight", f"{prefix}.b.0.bias": "b.0.bias"}
    assert renamed(*names) == names


def test_wrappers_are_stripped_at_any_depth() -> None:
    names = {
        "a._orig_mod.module.weight": "a.weight",
        "a._orig_mod.module.b.module.0._fsdp_wrapped_module.bias": "a.b.0.bias",
    }
    assert renamed(*names) == names


@pytest.mark.parametrize(
    "name", ["submodule.weight", "a.submodule.b", "module_list.0", "a._orig_mod_.b", "modules.a"]
)
def test_segments_that_only_contain_a_wrappers_name_stay(name: str) -> None:
    assert renamed(name) == {name: name}


def test_a_parameter_called_like_a_wrapper_stays() -> None:
    assert renamed("a.module", "b._orig_mod") == {
        "a.module": "a.module",
        "b._orig_mod": "b._orig_mod",
    }


def test_module_stays_where_it_has_siblings() -> None:
    names = ("net.module.weight", "net.fc.weight")
    assert renamed(*names) == {name: name for name in names}


def test_module_stays_where_the_network_itself_has_it() -> None:
    """Only the network's own names can tell a real only child from a wrapper."""
    names = ("net.module.0.weight", "net.module.0.bias")
    known = {"net.module.0.weight", "net.module.0.bias"}
    assert set(renamed(*names).values()) == {"net.0.weight", "net.0.bias"}
    assert set(renamed(*names, known=known).values()) == known
    assert set(renamed(*names, keep_module=True).values()) == known


def test_a_wrapper_around_a_real_module_is_stripped_once() -> None:
    names = ("net.module.module.weight", "net.module.module.bias")
    known = {"net.module.weight", "net.module.bias"}
    assert set(renamed(*names, known=known).values()) == known


def test_a_wrapper_around_the_whole_does_not_hide_a_real_module_deep_inside() -> None:
    names = ("module.net.a.module.weight", "module.net.a.module.bias")
    known = {"net.a.module.weight", "net.a.module.bias"}
    assert set(renamed(*names, known=known).values()) == known


def test_two_names_that_would_become_one_are_an_error() -> None:
    with pytest.raises(CheckpointError, match=r"a\.weight and a\._orig_mod\.weight would both"):
        renamed("a.weight", "a._orig_mod.weight")


def test_in_a_lightning_module_the_network_is_found() -> None:
    names = ("net.a.weight", "criterion.weight", "acc.total")
    assert renamed(*names, is_lightning=True) == {"net.a.weight": "a.weight"}
    assert renamed("backbone.a", "backbone.b", is_lightning=True) == {
        "backbone.a": "a",
        "backbone.b": "b",
    }
    assert len(renamed("generator.a", "critic.a", is_lightning=True)) == 2


def test_a_network_of_another_name_beside_a_buffer_is_said() -> None:
    names = Names(["body.a.weight", "body.b", "class_weights"], is_lightning=True)
    assert [*names.new] == ["body.a.weight", "body.b", "class_weights"]
    (note,) = names.notes
    assert note.startswith("all but class_weights lie below body; --prefix body")
    assert Names(["body.a.weight", "head.a.weight", "b"], is_lightning=True).notes == []


def test_outside_lightning_nothing_but_wrappers_is_stripped() -> None:
    assert renamed("model.a", "model.b") == {"model.a": "model.a", "model.b": "model.b"}


def test_a_prefix_names_the_network() -> None:
    names = ("gan.module.generator.a", "gan.module.critic.a")
    assert renamed(*names, prefix="gan.critic") == {"gan.module.critic.a": "a"}
    assert len(renamed(*names, prefix="", is_lightning=True)) == 2
    with pytest.raises(CheckpointError, match=r"nothing is called g\.\*; there is: gan"):
        renamed(*names, prefix="g")


def test_averaged_weights_are_preferred_unless_declined() -> None:
    names = ("net.a", "ema_net.module.a", "ema_net.n_averaged")
    assert renamed(*names, is_lightning=True) == {"ema_net.module.a": "a"}
    assert renamed(*names, is_lightning=True, ema=False) == {"net.a": "a"}
    assert renamed("net.a", "net.b", "ema.a", is_lightning=True).keys() == {"net.a", "net.b"}


def test_a_counter_of_the_network_itself_stays() -> None:
    """Only AveragedModel's own lies beside a `module`."""
    names = {"module.n_averaged": "n_averaged", "module.weight": "weight"}
    assert renamed(*names) == names


def test_versions_of_modules_follow_their_names() -> None:
    versions = {
        "": {"version": 1},
        "net": {"version": 3},
        "net._orig_mod.module": {"version": 4},
        "net._orig_mod.module.bn": {"version": 2, "other": object()},
    }
    names = Names(["net._orig_mod.module.bn.weight"], is_lightning=True, versions=versions)
    assert names.metadata == {"": {"version": 4}, "bn": {"version": 2}}


def test_a_prefix_that_lies_deeper_is_suggested() -> None:
    names = ("gan.module.generator.a", "gan.module.critic.0.a", "gan.module.critic.1.critic.a")
    with pytest.raises(CheckpointError, match=r"called critic\.\*; --prefix gan\.critic is there"):
        renamed(*names, prefix="critic.")
    assert renamed(*names, prefix="gan.critic").keys() == set(names[1:])


def test_a_wrapper_inside_a_real_module_is_known_too() -> None:
    names = ("net.module.a.module.weight", "net.module.a.module.bias")
    known = {"net.module.a.weight", "net.module.a.bias"}
    assert set(renamed(*names, known=known).values()) == known


def test_a_wrapper_that_only_its_name_tells_is_said() -> None:
    assert "--keep-module" in Names(["module.a", "module.b"]).notes[0]
    for certain in (["a.b", "module"], ["module.a", "n_averaged"], ["module.a", "b"]):
        assert Names(certain).notes == []
    assert Names(["module.a"], keep_module=True).notes == []
    assert Names(["module.module.a"], known=["module.a"]).notes == []


def test_averages_that_are_left_out_are_said() -> None:
    raw, average = (
        ("model.a.b", "model.c", "model.d", "model.e"),
        ("model_ema.ab", "model_ema.decay"),
    )
    names = (*raw, *average, "loss_avg.total")
    (note,) = Names(names, is_lightning=True).notes
    assert "--prefix model_ema takes it" in note
    (note,) = Names(["net.a", "swa_net.a"], is_lightning=True).notes
    assert note == "swa_net is the average of net; --no-ema takes net"
    assert Names(names, is_lightning=True, ema=False).notes == []


def test_many_nested_modules_take_memory_in_proportion_to_their_names() -> None:
    """The paths of all of them, each whole, would be a thousand times the names' own size."""
    names = [f"m{i}.{'module.' * 96}weight" for i in range(300)]
    versions = {name: {"version": 1} for name in names}
    tracemalloc.start()
    try:
        assert set(Names(names, versions=versions).new.values()) == {
            f"m{i}.weight" for i in range(300)
        }
        assert tracemalloc.get_traced_memory()[1] <= 20 * 2 * sum(map(len, names))
    finally:
        tracemalloc.stop()
