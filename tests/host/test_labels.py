"""Labels of tokens from the text and from ids, for every kind of tokenizer."""

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    BertForTokenClassification,
    ByT5Tokenizer,
    CanineTokenizer,
    PreTrainedTokenizerFast,
    T5Config,
    T5ForConditionalGeneration,
)

import unilinattn as ula
from tests.texts import mamba, tokenizer
from unilinattn.errors import InputError
from unilinattn.host.labels import labels_of_ids, token_text
from unilinattn.host.text import encoded
from unilinattn.results.words import CONTINUATION

TEXTS = ["naïve café 💩 costs 3 €", "The naïve 😀 שלום  עולם\nplays", "नमस्ते 👩‍👩‍👧 ﬁne"]
PLAIN = "playing tokenization of naïve The plays"


def byte_level(trim: bool) -> Tokenizer:
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=290, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator([PLAIN], trainer)
    backend.post_processor = processors.ByteLevel(trim_offsets=trim)
    return backend


def word_piece() -> Tokenizer:
    normalizer = normalizers.BertNormalizer()
    letters = sorted(set(normalizer.normalize_str("".join([*TEXTS, PLAIN]))))
    tokens = ["[UNK]", "[CLS]", "[SEP]", "[PAD]", "ca", "##fe", "plays", *letters, *(f"##{one}" for one in letters)]
    backend = Tokenizer(models.WordPiece(vocab={token: at for at, token in enumerate(tokens)}, unk_token="[UNK]"))
    backend.normalizer, backend.pre_tokenizer = normalizer, pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece(cleanup=False)
    backend.post_processor = processors.BertProcessing(("[SEP]", 2), ("[CLS]", 1))
    return backend


def unigram() -> Tokenizer:
    backend = Tokenizer(models.Unigram())
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    trainer = trainers.UnigramTrainer(vocab_size=60, show_progress=False, special_tokens=["<unk>"], unk_token="<unk>")
    backend.train_from_iterator([PLAIN], trainer)
    return backend


def byte_fallback() -> Tokenizer:
    """Llama's: spaces are ▁, one is added before the text, and unknown characters are bytes."""
    vocabulary = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"naves", "▁n", "▁na"]
    merges = [("▁", "n"), ("▁n", "a")]
    ids = {token: at for at, token in enumerate(vocabulary)}
    backend = Tokenizer(models.BPE(vocab=ids, merges=merges, byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(parts)
    return backend


NAMES = ["input_ids", "token_type_ids", "attention_mask"]
SPECIAL = dict(model_input_names=NAMES, cls_token="[CLS]", sep_token="[SEP]", pad_token="[PAD]", unk_token="[UNK]")
FAST: dict[str, Callable[[], Any]] = {
    "byte-level BPE": lambda: PreTrainedTokenizerFast(tokenizer_object=byte_level(False)),
    "byte-level BPE, trimmed offsets": lambda: PreTrainedTokenizerFast(tokenizer_object=byte_level(True)),
    "WordPiece": lambda: PreTrainedTokenizerFast(tokenizer_object=word_piece(), **SPECIAL),
    "Unigram": lambda: PreTrainedTokenizerFast(tokenizer_object=unigram(), unk_token="<unk>"),
    "byte fallback": lambda: PreTrainedTokenizerFast(tokenizer_object=byte_fallback(), unk_token="<unk>"),
}
SLOW: dict[str, Callable[[], Any]] = {"bytes (ByT5)": ByT5Tokenizer, "characters (CANINE)": CanineTokenizer}


@cache
def cached(name: str) -> Any:
    return (FAST | SLOW)[name]()


def joined(labels: list[str], *left_out: str) -> str:
    return "".join(label for label in labels if label not in (CONTINUATION, "▁", *left_out))


@pytest.mark.parametrize("name", [*FAST, *SLOW])
@pytest.mark.parametrize("text", TEXTS)
def test_labels_join_to_the_text(name: str, text: str) -> None:
    reader = cached(name)
    whole = encoded(text, reader)
    (labels,) = whole.labels
    ids = whole.arguments["input_ids"][0].tolist()
    special = ("[CLS]", "[SEP]", "</s>", "\ue000", "\ue001")
    assert len(labels) == len(ids)
    assert joined(labels, *special) == text
    known = "[UNK]" not in labels_of_ids(reader, ids) and "<unk>" not in labels_of_ids(reader, ids)
    if known and name != "WordPiece":
        assert joined(labels_of_ids(reader, ids), *special) == text


def test_a_character_of_several_tokens_has_its_text_at_the_first() -> None:
    for name in ("byte-level BPE", "byte fallback"):
        (labels,) = encoded("é 💩", FAST[name]()).labels
        assert [label for label in labels if label != "▁"] == ["é", "◌", " ", "💩", "◌", "◌", "◌"]
    assert labels_of_ids(ByT5Tokenizer(), ByT5Tokenizer()("é 💩").input_ids) == [*"é◌ 💩◌◌◌", "</s>"]


def test_pieces_of_words_have_the_letters_of_the_text() -> None:
    reader = FAST["WordPiece"]()
    text = encoded("Café", reader)
    assert text.labels == [["[CLS]", "Ca", "fé", "[SEP]"]]
    ids = text.arguments["input_ids"][0].tolist()
    assert reader.convert_ids_to_tokens(ids)[2] == "##fe"
    assert labels_of_ids(reader, ids) == ["[CLS]", "ca", "fe", "[SEP]"]


def test_a_part_of_a_character_by_itself_is_its_bytes() -> None:
    reader = FAST["byte-level BPE"]()
    first = reader("💩").input_ids[0]
    assert token_text(reader, first) == "<0xF0>"
    assert labels_of_ids(reader, [first]) == ["<0xF0>"]


@pytest.mark.parametrize("side", ["left", "right"])
def test_words_and_pages_have_the_characters_of_the_text(side: str, tmp_path: Any) -> None:
    texts = ["naïve 💩 Paris", "is"]
    result = ula.explain(mamba(), texts, tokenizer=tokenizer(side), target=-1)
    assert result.words().tokens == (("naïve", " 💩", " Paris"), ("is", "", ""))
    assert [joined(row, "<pad>") for row in result.tokens] == texts
    merged = result.spans([[(6, 7)], []]).tokens[0]
    assert "💩" in merged and merged.count(CONTINUATION) == result.tokens[0].count(CONTINUATION) - 3
    page = result.to_html()
    assert "💩" in page and "ð" not in page and "Ã" not in page
    ids = encoded(texts, tokenizer(side)).arguments
    assert ula.explain(mamba(), ids, tokens=tokenizer(side), target=-1).tokens[1] == result.tokens[1]


def test_the_words_of_a_tokenizers_mapping_are_known() -> None:
    texts = ["The 💩 of France", "Paris"]
    plain = ula.explain(mamba(), texts, tokenizer=tokenizer(), target=-1)
    inputs = tokenizer()(texts, padding=True, return_tensors="pt")
    result = ula.explain(mamba(), inputs, tokenizer=tokenizer(), target=-1)
    assert (result.word_ids, result.offsets) == (plain.word_ids, plain.offsets)
    assert result.words().tokens == plain.words().tokens
    assert torch.equal(result.words().scores, plain.words().scores)
    assert ula.explain(mamba(), inputs, target=-1).words().tokens is None
    with pytest.raises(InputError, match="the tokens of one that is unknown; give a position, or the text"):
        ula.explain(mamba(), inputs, tokenizer=tokenizer(), target="France")
    inputs["input_ids"] = inputs["input_ids"] + 1
    assert ula.explain(mamba(), inputs, tokenizer=tokenizer(), target=-1).word_ids is None


SMALL = dict(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, vocab_size=200)
PAIR = ("Café plays", "café 💩")


def test_pairs_of_texts_have_their_words_and_token_types() -> None:
    reader = FAST["WordPiece"]()
    torch.manual_seed(0)
    model = BertForSequenceClassification(BertConfig(**SMALL, id2label={0: "no", 1: "yes"})).eval()
    result = ula.explain(model, [PAIR, "plays"], tokenizer=reader, target=0)
    inputs = reader([PAIR[0], "plays"], [PAIR[1], ""], return_tensors="pt", padding=True)
    alone = ula.explain(model, reader(*PAIR, return_tensors="pt"), tokenizer=reader, target=0)
    assert torch.equal(alone.extras["logit"], ula.explain(model, [PAIR], tokenizer=reader, target=0).extras["logit"])
    assert inputs["token_type_ids"].any()
    words = result.select(batch=0).words().tokens[0]
    assert words == ("[CLS]", "Café", " plays", "[SEP]", "café", " 💩", "[SEP]")
    assert alone.words().tokens[0] == ("[CLS]", "cafe", " plays", "[SEP]", "cafe", " 💩", "[SEP]")
    assert result.logit_names[0][0] in ("no", "yes")
    begin = len(PAIR[0])
    assert result.select(batch=0).spans([(begin, begin + 4)]).scores.shape == (8,)
    place = ula.explain(model, [PAIR], tokenizer=reader, target="💩").options["target"]
    assert result.tokens[0][place[0]] == " 💩"


def test_the_words_of_a_pair_without_a_separator_are_not_merged() -> None:
    result = ula.explain(mamba(), [("Paris", "is")], tokenizer=tokenizer(), target=-1)
    assert result.words().tokens == (("Paris", "is"),)


def test_classes_of_tokens_are_named_by_the_model() -> None:
    torch.manual_seed(0)
    names = {0: "O", 1: "B-LOC", 2: "I-LOC"}
    model = BertForTokenClassification(BertConfig(**SMALL, id2label=names, label2id={})).eval()
    ids = torch.tensor([[1, 7, 8, 2]])
    assert ula.explain(model, ids, target=1, logit=(1, 2)).logit_names == (("B-LOC", "I-LOC"),)
    predicted = int(model(ids).logits[0, 2].argmax())
    assert ula.explain(model, ids, target=2, tokens=FAST["WordPiece"]()).logit_names == ((names[predicted],),)


def test_texts_that_are_none_are_refused() -> None:
    with pytest.raises(InputError, match=r"text 1 has '\\ud83d' at character 4, half of a surrogate pair"):
        ula.explain(mamba(), ["Paris", "The \ud83d"], tokenizer=tokenizer())
    with pytest.raises(InputError, match="texts and a tuple; give one text for each sequence, or one pair"):
        ula.explain(mamba(), ["Paris", ("a", "b", "c")], tokenizer=tokenizer())


@pytest.mark.parametrize("text", ["naïve 💩 Paris", "P", "unknown ü"])
def test_each_layer_of_an_encoder_and_a_decoder_has_the_words_that_it_reads(text: str) -> None:
    # A text of one token is as long as the start of the decoder.
    config = T5Config(vocab_size=290, d_model=8, d_kv=4, d_ff=12, num_layers=1, num_heads=2, decoder_start_token_id=0)
    reader = tokenizer() if "unknown" not in text else cached("Unigram")
    traced = ula.trace(T5ForConditionalGeneration(config).eval(), text, tokenizer=reader, progress=False)
    assert traced.text is not None and traced.text.labels is not None
    encoder, decoder, cross = (ula.explain(traced, method="raw", layers=[layer]) for layer in range(3))
    for result in (encoder, cross):
        assert result.tokens == (tuple(traced.text.labels[0]),)
        assert "".join(result.words().tokens[0]).lstrip("▁") == text
    assert (decoder.tokens, decoder.word_ids) == ((tuple(reader.convert_ids_to_tokens([0])),), None)
