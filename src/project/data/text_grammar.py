"""A text to begin with, made of a small grammar: nothing to download, and the same everywhere."""

import numpy as np

ADJECTIVES = ("old", "small", "grey", "happy", "tired", "clever")
NOUNS = ("cat", "dog", "horse", "bird", "farmer", "child", "king", "student")
VERBS = ("see", "follow", "like", "hear", "know", "chase")
ENDINGS = ("at night", "in the garden", "every day", "near the river")
PLURALS = {"child": "children"}


def sentences(num_sentences: int, seed: int) -> str:
    """Sentences whose verbs agree with their subjects, also across a relative clause.

    ``the old cat that the dogs chase sees a king at night.``

    Args:
        num_sentences: one on each line.
        seed: decides which.
    """
    rng = np.random.default_rng(seed)
    return "".join(f"{_sentence(rng)}.\n" for _ in range(num_sentences))


def _sentence(rng: np.random.Generator) -> str:
    subject, is_one = _phrase(rng)
    words = [subject]
    if rng.random() < 0.3:
        other, is_one_other = _phrase(rng)
        words.append(f"that {other} {_verb(rng, is_one_other)}")
    words += [_verb(rng, is_one), _phrase(rng)[0]]
    if rng.random() < 0.3:
        words.append(_one_of(rng, ENDINGS))
    return " ".join(words)


def _phrase(rng: np.random.Generator) -> tuple[str, bool]:
    """A noun with what stands before it, and whether it is one thing."""
    is_one, noun = bool(rng.random() < 0.5), _one_of(rng, NOUNS)
    article = _one_of(rng, ("the", "a") if is_one else ("the", "some"))
    words = [_one_of(rng, ADJECTIVES)] if rng.random() < 0.4 else []
    words.append(noun if is_one else PLURALS.get(noun, noun + "s"))
    if article == "a" and words[0][0] in "aeiou":
        article = "an"
    return " ".join([article, *words]), is_one


def _verb(rng: np.random.Generator, is_one: bool) -> str:
    return _one_of(rng, VERBS) + ("s" if is_one else "")


def _one_of(rng: np.random.Generator, words: tuple[str, ...]) -> str:
    return words[rng.integers(len(words))]
