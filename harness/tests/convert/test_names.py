import pytest

from harness.convert import CheckpointError
from harness.convert.names import rename


def renamed(
    *names: str, prefix: str = "auto", is_lightning: bool = False, ema: bool = True
) -> dict[str, str]:
    return rename(names, prefix, is_lightning, ema, keep_module=False)[0]


def test_what_only_looks_like_a_wrapper_stays() -> None:
    """Other words, parameters, a `module` that has siblings."""
    for names in (
        *(["submodule.weight"], ["a.submodule.b"], ["module_list.0"], ["a._orig_mod_.b"]),
        *(["modules.a"], ["a.module", "b._orig_mod"], ["net.module.weight", "net.fc.weight"]),
    ):
        assert renamed(*names) == {name: name for name in names}


def test_a_wrapper_that_only_its_name_tells_is_said_and_may_be_kept() -> None:
    names = ("net.module.0.weight", "net.module.0.bias")
    new, (note,) = rename(names, "auto", True, True, keep_module=False)
    assert set(new.values()) == {"0.weight", "0.bias"}
    assert "--prefix net takes it for the network's own child" in note
    assert set(renamed(*names, prefix="net").values()) == {"module.0.weight", "module.0.bias"}
    for certain in (["a.b", "module"], ["module.a", "n_averaged"], ["module.a", "b"]):
        assert rename(certain, "auto", False, True, keep_module=False)[1] == []
    assert renamed("module.a", "n_averaged") == {"module.a": "a"}


def test_two_names_that_would_become_one_are_an_error() -> None:
    with pytest.raises(CheckpointError, match=r"a\.weight and a\._orig_mod\.weight would both"):
        renamed("a.weight", "a._orig_mod.weight")


def test_only_net_and_model_are_taken_for_the_network() -> None:
    """An only child of another name stays: the weights fit the module that was trained."""
    assert len(renamed("generator.a", "critic.a", is_lightning=True)) == 2
    assert renamed("encoder.a", is_lightning=True) == {"encoder.a": "encoder.a"}
    assert renamed("model.a", "loss.w", is_lightning=True) == {"model.a": "a"}
    assert renamed("model.a", "model.b") == {"model.a": "model.a", "model.b": "model.b"}


def test_a_prefix_names_the_network() -> None:
    names = ("gan._orig_mod.generator.a", "gan._orig_mod.critic.a")
    assert renamed(*names, prefix="gan.critic") == {"gan._orig_mod.critic.a": "a"}
    assert len(renamed(*names, prefix="", is_lightning=True)) == 2
    with pytest.raises(CheckpointError, match=r"nothing is called g\.\*; there is: gan"):
        renamed(*names, prefix="g")


def test_averaged_weights_are_preferred_unless_declined() -> None:
    names = ("net.a", "ema_net.module.a", "ema_net.n_averaged")
    assert renamed(*names, is_lightning=True) == {"ema_net.module.a": "a"}
    assert renamed(*names, is_lightning=True, ema=False) == {"net.a": "a"}
    assert renamed("net.a", "net.b", "ema.a", is_lightning=True).keys() == {"net.a", "net.b"}
    _, (note,) = rename(["net.a", "swa_net.a"], "auto", True, True, keep_module=False)
    assert note == "swa_net is the average of net; --no-ema takes net"
