import json
import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer, CLIPTokenizer

from noctowl import text
from noctowl.errors import DataError, ModelError

LONG = "a " * 15 + "cat"  # 16 words: 18 tokens
FULL = "a " * 13 + "cat"  # 14 words: 16 tokens


@pytest.fixture(scope="module")
def tokenizer():
    return text.clip_tokenizer()


def test_known_ids(tokenizer):
    out = text.tokenize(tokenizer, ["A photo of a cat.", ""])
    # the ids that CLIP's paper code gives this sentence
    assert out.input_ids[0].tolist() == [49406, 320, 1125, 539, 320, 2368, 269, 49407] + [0] * 8
    assert out.input_ids[1].tolist() == [49406, 49407] + [0] * 14
    assert out.attention_mask.sum(1).tolist() == out.lengths.tolist() == [8, 2]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (49406, 49407, 0)
    assert (len(tokenizer), tokenizer.model_max_length, tokenizer.pad_token) == (49408, 16, "!")
    assert out.input_ids.dtype == out.attention_mask.dtype == out.lengths.dtype == torch.int64


def test_policies_on_captions_at_and_over_the_limit(tokenizer):
    texts = ["a cat", LONG, FULL]
    cut = text.tokenize(tokenizer, texts, "truncate")
    assert cut.lengths.tolist() == [4, 18, 16]
    assert cut.input_ids[1].tolist() == [49406] + [320] * 14 + [49407]
    assert (cut.kept.tolist(), cut.n_over) == ([True] * 3, 1)
    dropped = text.tokenize(tokenizer, texts, "drop")
    assert (dropped.kept.tolist(), dropped.n_over) == ([True, False, True], 1)
    assert dropped.lengths.tolist() == [4, 18, 16]
    assert dropped.input_ids[1].sum() == dropped.attention_mask[1].sum() == 0
    assert torch.equal(dropped.input_ids[[0, 2]], cut.input_ids[[0, 2]])
    with pytest.raises(DataError, match=r"caption too long: 'a a .* cat' has 18 tokens, the limit is 16 .*1 of 3"):
        text.tokenize(tokenizer, texts)
    assert text.tokenize(tokenizer, [FULL]).kept.all()
    with pytest.raises(DataError, match="text policy is 'pad'; allowed are"):
        text.tokenize(tokenizer, texts, "pad")


def test_seventeen_tokens_are_one_too_many(tokenizer):
    seventeen = "a " * 14 + "cat"
    assert text.token_lengths(tokenizer, [seventeen]).tolist() == [17]
    with pytest.raises(DataError, match="has 17 tokens, the limit is 16"):
        text.tokenize(tokenizer, [seventeen])
    assert text.tokenize(tokenizer, [seventeen], "truncate").input_ids[0, -1] == 49407
    assert not text.tokenize(tokenizer, [seventeen], "drop").kept.any()


def test_no_texts(tokenizer):
    out = text.tokenize(tokenizer, [])
    assert (tuple(out.input_ids.shape), len(out), out.n_over) == ((0, 16), 0, 0)
    assert text.token_lengths(tokenizer, []).shape == (0,)


def test_the_library_truncates_and_pads_alike(tokenizer):
    texts = ["A Café, 100% naïve!", LONG, "  two   blanks ", "don't", "世界", "<|endoftext|> x", "é"]
    ours = text.tokenize(tokenizer, texts, "truncate")
    library = tokenizer(texts, padding="max_length", truncation=True, return_tensors="pt")
    assert torch.equal(ours.input_ids, library.input_ids)
    assert torch.equal(ours.attention_mask, library.attention_mask)
    assert torch.equal(text.tokenize(tokenizer, texts, "truncate").lengths, ours.lengths)  # no state left behind


@pytest.mark.golden
def test_every_published_caption_gets_the_published_ids_in_seconds(tokenizer, shared):
    golden = AutoTokenizer.from_pretrained(shared / "golden/models/clip-bpe-owl-tokenizer")
    captions: list[str] = []
    for path in sorted((shared / "data/fgovd").glob("*/*.json")):
        captions += [entry["name"] for entry in json.loads(path.read_text())["categories"]]
    start = time.perf_counter()
    ours = text.tokenize(tokenizer, captions, "truncate")
    assert time.perf_counter() - start < 30
    expected = golden(captions, padding="max_length", truncation=True, return_tensors="pt")
    assert len(captions) == 99_861
    assert torch.equal(ours.input_ids, expected.input_ids)
    assert torch.equal(ours.attention_mask, expected.attention_mask)
    assert ours.n_over == 27_412


WORDS = ["A translucent striped mug.", "a crocheted, dark-purple tablecloth", "naïve"]


@pytest.mark.parametrize("n_merges", [0, 1000, 4000])
def test_small_tokenizer_splits_its_words_as_the_full_one_does(tokenizer, n_merges):
    small = text.small_clip_tokenizer(WORDS, n_merges)
    for words in WORDS:
        assert small.tokenize(words) == tokenizer.tokenize(words)
    assert 512 + n_merges + 2 < len(small) < 512 + n_merges + 2 + 60
    assert (small.pad_token_id, small.bos_token_id, small.eos_token_id) == (0, len(small) - 2, len(small) - 1)
    assert sorted(small.get_vocab().values()) == list(range(len(small)))


def test_small_tokenizer_encodes_any_text_and_survives_saving(tmp_path):
    small = text.small_clip_tokenizer(WORDS, 500)
    small.save_pretrained(tmp_path)
    texts = [*WORDS, "xylophone 世界 !", ""]
    expected = text.tokenize(small, texts, "truncate")
    assert expected.input_ids.max() == small.eos_token_id
    for loaded in (AutoTokenizer.from_pretrained(tmp_path), CLIPTokenizer.from_pretrained(tmp_path)):
        assert torch.equal(text.tokenize(loaded, texts, "truncate").input_ids, expected.input_ids)
        assert (loaded.model_max_length, loaded.pad_token_id, loaded.pad_token) == (16, 0, "!")


def test_small_tokenizer_is_cut_at_the_merges_that_exist():
    assert len(text.small_clip_tokenizer([], 48_894)) == 49_408
    with pytest.raises(ModelError, match="n_merges is 48895"):
        text.small_clip_tokenizer([], 48_895)


def test_a_missing_vocabulary_says_where_it_comes_from(monkeypatch):
    text._merges.cache_clear()
    monkeypatch.setattr(text.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelError, match="open_clip_torch"):
        text.clip_tokenizer()


@pytest.mark.parametrize(
    ("name", "prompt"),
    [
        ("bow_(weapon)", "a bow weapon"),
        ("bow_(decorative_ribbons)", "a bow decorative ribbons"),
        ("T-shirt", "a t-shirt"),
        ("hot-air_balloon", "a hot-air balloon"),
        ("CD_player", "a cd player"),
        ("Dixie cup", "a dixie cup"),
        ("first-aid_kit", "a first-aid kit"),
        ("crème_brûlée #2", "a cr me br l e #2"),
    ],
)
def test_class_prompts(name, prompt):
    assert text.class_prompt(name) == prompt


@given(st.text())
def test_class_prompts_hold_only_what_is_allowed(name):
    prompt = text.class_prompt(name)
    assert set(prompt) <= set("abcdefghijklmnopqrstuvwxyz0123456789-# ")
    assert "  " not in prompt
    assert prompt == prompt.strip()


@pytest.mark.golden
def test_class_prompts_of_the_published_runs(shared):
    prompts = json.loads((shared / "golden/train_owlv2_triplet_mse.json").read_text())["lvis_prompts"]
    assert [text.class_prompt(prompt[2:].replace(" ", "_")) for prompt in prompts] == prompts
