import pytest

from harness.convert import CheckpointError
from harness.convert.names import Names


def renamed(*names: str, **options: object) -> dict[str, str]:
    return Names(names, **options).new


def test_what_only_looks_like_a_wrapper_stays() -> None:
    """Other words, parameters, a `module` that has siblings."""
    for names in (
        *(["submodule.weight"], ["a.submodule.b"], ["module_list.0"], ["a._orig_mod_.b"]),
        *(["modules.a"], ["a.module", "b._orig_mod"], ["net.module.weight", "net.fc.weight"]),
    ):
        assert renamed(*names) == {name: name for name in names}


def test_a_wrapper_that_only_its_name_tells_is_said_and_may_be_kept() -> None:
    names = ("net.module.0.weight", "net.module.0.bias")
    assert set(renamed(*names).values()) == {"net.0.weight", "net.0.bias"}
    assert set(renamed(*names, keep_module=True).values()) == {*names}
    assert "--keep-module" in Names(["module.a", "module.b"]).notes[0]
    for certain in (["a.b", "module"], ["module.a", "n_averaged"], ["module.a", "b"]):
        assert Names(certain).notes == []
    assert Names(["module.a"], keep_module=True).notes == []


def test_two_names_that_would_become_one_are_an_error() -> None:
    with pytest.raises(CheckpointError, match=r"a\.weight and a\._orig_mod\.weight would both"):
        renamed("a.weight", "a._orig_mod.weight")


def test_two_networks_and_what_is_no_lightning_module_keep_their_names() -> None:
    assert len(renamed("generator.a", "critic.a", is_lightning=True)) == 2
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
    (note,) = Names(["net.a", "swa_net.a"], is_lightning=True).notes
    assert note == "swa_net is the average of net; --no-ema takes net"
