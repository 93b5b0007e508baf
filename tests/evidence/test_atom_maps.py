"""Atom maps: bonds and maps worked out by hand, and the head of the cached model."""

from typing import Any

import pytest
import torch

from evidence import atom_maps, checkpoints, truths
from unilinattn.optional import MissingExtraError


def tokens_of(text: str) -> list[str]:
    return ["[CLS]", *checkpoints.smiles_tokens(text), "[SEP]"]


def test_bonds_of_branches_rings_and_molecules() -> None:
    tokens = tokens_of("CC(=O)Cl.C1=CO1>>CC")
    # Positions: C 1, C 2, O 5, Cl 7, C 9, C 12, O 13, and C 16, C 17 of the product.
    assert atom_maps.bonds(tokens) == {
        1: {2: ""},
        2: {1: "", 5: "=", 7: ""},
        5: {2: "="},
        7: {2: ""},
        9: {12: "=", 13: ""},
        12: {9: "=", 13: ""},
        13: {12: "", 9: ""},
        16: {17: ""},
        17: {16: ""},
    }


def test_a_ring_opens_on_an_atom() -> None:
    with pytest.raises(ValueError, match="token 1, '1', follows no atom"):
        atom_maps.bonds(tokens_of("1CC>>CC"))


def test_elements_of_atoms_in_and_out_of_brackets() -> None:
    assert [atom_maps.element(token) for token in ("C", "c", "Cl", "[N+]", "[nH]", "[O-]")] == [
        "c",
        "c",
        "cl",
        "n",
        "n",
        "o",
    ]


def test_neighbours_of_a_mapped_pair_outweigh_a_larger_attention() -> None:
    # CO.CN>>CO: the oxygen is certain, and the carbon next to it attends more to the other carbon.
    tokens = tokens_of("CO.CN>>CO")
    attention = torch.zeros(len(tokens), len(tokens))
    carbon, oxygen, other = 1, 2, 4
    attention[8, oxygen] = 1
    attention[7, carbon], attention[7, other] = 0.2, 0.6
    assert atom_maps.atom_map(attention, tokens) == {8: oxygen, 7: carbon}
    # Attention from the reactants counts as much; another element never does.
    attention = torch.zeros(len(tokens), len(tokens))
    attention[other, 7] = 0.3
    attention[7, oxygen] = 0.9
    assert atom_maps.atom_map(attention, tokens) == {7: other}


def test_an_atom_of_the_reactants_is_mapped_once() -> None:
    tokens = tokens_of("C.C>>C.C")
    attention = torch.zeros(len(tokens), len(tokens))
    attention[5, 1], attention[5, 3] = 0.9, 0.1
    attention[7, 1], attention[7, 3] = 0.8, 0.2
    assert atom_maps.atom_map(attention, tokens) == {5: 1, 7: 3}


def test_atoms_of_equal_bonds_are_equivalent() -> None:
    tokens = tokens_of("CC(=O)O.Cc1ccccc1>>C")
    reactants, _ = atom_maps.sides(tokens)
    classes = atom_maps.equivalent(tokens)
    methyl, carbon, double, single, toluene, ipso, *ring = reactants
    # The two oxygens differ by their bonds, and the methyls by their neighbours.
    assert all(classes[atom] == [atom] for atom in (methyl, carbon, double, single, toluene, ipso, ring[2]))
    assert classes[ring[0]] == [ring[0], ring[4]]
    assert classes[ring[1]] == [ring[1], ring[3]]


def test_the_longest_equal_text_around_an_atom() -> None:
    tokens = tokens_of("CN.CCO>>CCO")
    product = tokens.index(">>") + 2
    # The atom and its neighbours on both sides are in the second molecule: O to the right, C to the left.
    reactants, _ = atom_maps.sides(tokens)
    assert dict(zip(reactants, atom_maps.context(tokens, product, reactants), strict=True)) == {
        1: 2.0,
        2: 0.0,
        4: 2.0,
        5: 4.0,
        6: 0.0,
    }


def test_the_map_of_the_head_is_the_attention_that_the_package_reads() -> None:
    try:
        model, vocabulary = checkpoints.atom_maps(download=False)
    except MissingExtraError as error:
        pytest.skip(str(error))
    host: Any = model
    host.set_attn_implementation("eager")
    for text in truths.texts("reactions")[:3]:
        ids = checkpoints.ids_of(tokens_of(text), vocabulary)
        with torch.no_grad():
            attentions = host(torch.tensor([ids]), output_attentions=True).attentions
        expected = attentions[atom_maps.LAYER][0, atom_maps.HEAD]
        torch.testing.assert_close(atom_maps.head(host, ids), expected, rtol=1e-5, atol=1e-6)
        assert not torch.allclose(expected, attentions[atom_maps.LAYER][0, atom_maps.HEAD - 1], atol=1e-2)
