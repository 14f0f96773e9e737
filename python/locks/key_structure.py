"""How local the structure of keys is: what a basis of the page's own, of the sequence's and of the layer's captures of
the keys about their pages' centroids, at the same rank. In float64 and unquantised."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

RANKS = (1, 2, 4, 8)


def centred_pages(keys: Tensor, page_tokens: int) -> Tensor:
    """[pages, page_tokens, d] in float64: the keys of whole pages less their page's mean."""
    pages = keys[: keys.shape[0] // page_tokens * page_tokens].double().view(-1, page_tokens, keys.shape[1])
    return pages - pages.mean(1, keepdim=True)


def spectrum(centred: Tensor) -> tuple[Tensor, Tensor]:
    """Of each page's Gram matrix: eigenvalues [pages, page_tokens], the largest first, and eigenvectors in columns."""
    values, vectors = torch.linalg.eigh(centred @ centred.transpose(1, 2))
    return values.flip(1).clamp(min=0), vectors.flip(2)


def ideal_keys(keys: Tensor, page_tokens: int, rank: int) -> tuple[Tensor, Tensor]:
    """Keys [n, d] as each page's own basis of that rank about its centroid gives them back, and the spectral tail
    [pages] that it leaves: sum over m > rank of the Gram matrix's eigenvalues. Tokens behind the whole pages stay."""
    centred = centred_pages(keys, page_tokens)
    values, vectors = spectrum(centred)
    top = vectors[:, :, :rank]
    whole = centred.shape[0] * page_tokens
    back = keys.double().clone()
    back[:whole] += (top @ (top.transpose(1, 2) @ centred) - centred).view(whole, -1)
    return back.float(), values[:, rank:].sum(1)


@dataclass
class HeadEnergy:
    """Of one KV head's keys in pages of one size."""

    total: float
    own: list[float]  # captured by each page's own basis, for each of `ranks`
    ranks: list[int]
    scatter: Tensor  # [d, d]: sum over tokens of the outer products of centred keys

    @classmethod
    def of(cls, keys: Tensor, page_tokens: int) -> HeadEnergy:
        centred = centred_pages(keys, page_tokens)
        captured = spectrum(centred)[0].sum(0).cumsum(0)
        ranks = [rank for rank in RANKS if rank < page_tokens]
        rows = centred.flatten(0, 1)
        return cls(float(captured[-1]), [float(captured[rank - 1]) for rank in ranks], ranks, rows.T @ rows)

    def captured_by(self, basis: Tensor) -> list[float]:
        """By the first columns of an orthonormal basis [d, d], for each of `ranks`."""
        along = torch.einsum("ij,ik,kj->j", basis, self.scatter, basis).cumsum(0)
        return [float(along[rank - 1]) for rank in self.ranks]


def principal_basis(scatters: Iterable[Tensor]) -> Tensor:
    """The principal directions, in columns, of keys whose scatter matrices add up."""
    return torch.linalg.eigh(sum(scatters))[1].flip(1)


def energy_shares(heads: list[HeadEnergy]) -> list[list[dict[str, float]]]:
    """For KV heads of one layer, of one or more sequences: for each, a row a rank with the shares of its energy that
    the page's own basis, one basis for its sequence and KV head, and one basis for all of these heads together (the
    layer's) capture. The last two are fitted to the very keys on which they are judged."""
    layer = principal_basis(head.scatter for head in heads)
    rows = []
    for head in heads:
        sequence = head.captured_by(principal_basis([head.scatter]))
        shared = head.captured_by(layer)
        rows.append([
            {
                "rank": rank,
                "page_basis": own / head.total,
                "sequence_basis": one / head.total,
                "layer_basis": other / head.total,
            }
            for rank, own, one, other in zip(head.ranks, head.own, sequence, shared, strict=True)
        ])
    return rows
