"""Search by meaning: documents and queries as vectors (sentence-transformers), compared by faiss."""

from __future__ import annotations

import hashlib
import re
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from graft.trust import check_program
from graft_search.source import Hit
from graft_search.store import Corpus, Documents, build_once, short_hash

CHUNK = 4096  # documents turned into vectors at a time
E5_PREFIXES = ("query: ", "passage: ")


class DenseSource:
    """The documents whose vectors have the largest inner product (cosine) with the query's.

    `model` is a folder or a hub name. Some models were trained with a marker before each text and
    need it here, such as `query_prefix="query: ", document_prefix="passage: "`; a model with "e5" in
    its name gets these two unless others are given. `kind` is a faiss factory string: "Flat" compares
    with every document, exactly; "HNSW64" is the approximate index for corpora of millions. `vectors`
    is an existing faiss index file of this corpus in its order; then only queries are embedded.
    """

    def __init__(
        self,
        corpus: str,
        *,
        model: str,
        query_prefix: str | None = None,
        document_prefix: str | None = None,
        kind: str = "Flat",
        vectors: str | None = None,
        device: str | None = None,
        index: str | None = None,
    ) -> None:
        self.corpus = Corpus(corpus, index)
        if vectors is not None and not Path(vectors).is_file():
            raise ValueError(f"no faiss index file {vectors!r}")
        self.model, self.vectors, self.kind, self.device = model, vectors, kind, device
        marks = E5_PREFIXES if is_e5(model) else ("", "")
        self.query_prefix = marks[0] if query_prefix is None else query_prefix
        self.document_prefix = marks[1] if document_prefix is None else document_prefix
        made = [_identity(model), self.document_prefix, kind]
        given = [str(Path(vectors).resolve()), Path(vectors).stat().st_size] if vectors else None
        self.fingerprint = (
            f"dense:{self.corpus.hash}:{short_hash([made, self.query_prefix, given])}"
        )
        self._folder = self.corpus.folder / f"dense-{short_hash(made)}"
        self._lock = threading.Lock()
        self._opened: tuple[Documents, Any, Any] | None = None

    def open(self) -> None:
        with self._lock:
            self._open()

    def _open(self) -> tuple[Documents, Any, Any]:
        if self._opened is None:
            documents, encoder = self.corpus.documents(), self._encoder()
            file = self.vectors
            if file is None:
                build_once(self._folder, lambda folder: self._build(documents, encoder, folder))
                file = str(self._folder / "vectors.faiss")
            index = read_mapped(file)
            if index.ntotal != len(documents):
                raise ValueError(
                    f"{file} holds {index.ntotal} vectors, but {self.corpus.path} has "
                    f"{len(documents)} documents; build the vectors from this corpus"
                )
            width = _vectors(encoder, [""]).shape[1]
            if index.d != width:
                raise ValueError(
                    f"{file} holds vectors of {index.d} numbers, but {self.model} makes {width}; give "
                    "the model that the vectors were made with"
                )
            self._opened = documents, index, encoder
        return self._opened

    def _build(self, documents: Documents, encoder: Any, folder: Path) -> None:
        faiss, _ = _libraries()
        index = None
        for start in range(0, len(documents), CHUNK):
            numbers = range(start, min(start + CHUNK, len(documents)))
            texts = [self.document_prefix + documents[number].contents for number in numbers]
            vector_DH = _vectors(encoder, texts)
            if index is None:
                width = vector_DH.shape[1]
                index = faiss.index_factory(width, self.kind, faiss.METRIC_INNER_PRODUCT)
            if not index.is_trained:
                index.train(vector_DH)
            index.add(vector_DH)
        faiss.write_index(index, str(folder / "vectors.faiss"))

    def retrieve(self, queries: Sequence[str], topk: int) -> list[list[Hit]]:
        if not queries:
            return []
        with self._lock:  # one model serves one call at a time; a server sends batches
            documents, index, encoder = self._open()
            vector_QH = _vectors(encoder, [self.query_prefix + query for query in queries])
            score_QK, number_QK = index.search(vector_QH, min(topk, len(documents)))
        return [
            # -1 stands for a document that an approximate index did not find
            [Hit(*documents[n], float(s)) for n, s in zip(numbers, scores, strict=True) if n >= 0]
            for numbers, scores in zip(number_QK.tolist(), score_QK.tolist(), strict=True)
        ]

    def _encoder(self) -> Any:
        _, SentenceTransformer = _libraries()
        # the files of such a model name classes to import
        check_program(f"the embedding model {self.model!r}, which sentence-transformers opens")
        try:
            return SentenceTransformer(self.model, device=self.device)
        except (OSError, ValueError) as error:
            raise ValueError(
                f"cannot load the embedding model {self.model!r}: {error}; give the folder of a "
                "sentence-transformers model, or fetch it with `hf download`"
            ) from error


def is_e5(model: str) -> bool:
    """Whether a model expects "query: " and "passage: ", by its name: intfloat/e5-base-v2 does.

    The e5 models that take instructions (e5-mistral, multilingual-e5-large-instruct) do not.
    """
    name = Path(model).name.lower()
    return "e5" in re.split(r"[-_.]", name) and not {"instruct", "mistral"} & set(name.split("-"))


def read_mapped(file: str) -> Any:
    """A faiss index whose data stay in the file and are read where a search needs them.

    All processes of a machine share one copy in memory, the system's file cache.
    """
    faiss, _ = _libraries()
    try:
        return faiss.read_index(file, faiss.IO_FLAG_MMAP_IFC)
    except RuntimeError as error:
        raise ValueError(
            f"{file} is not a faiss index: {str(error).splitlines()[-1][:200]}"
        ) from error


def _libraries() -> tuple[Any, Any]:
    try:
        import faiss
        from sentence_transformers import SentenceTransformer
    except ImportError as error:
        raise ImportError(
            'search with source="dense" needs sentence-transformers and faiss: '
            'pip install "graft-rl[dense]"'
        ) from error
    return faiss, SentenceTransformer


def _vectors(encoder: Any, texts: list[str]) -> np.ndarray:
    """Unit vectors, [texts, width], float32."""
    found = encoder.encode(
        texts, convert_to_numpy=True, normalize_embeddings=True, show_progress_bar=False
    )
    return np.ascontiguousarray(found, dtype=np.float32)


def _identity(model: str) -> str:
    """A hub name, or a hash of the weights in a folder, which may then be moved."""
    folder = Path(model)
    if not folder.is_dir():
        return model
    found = hashlib.blake2b(digest_size=16)
    weights = (*folder.rglob("*.safetensors"), *folder.rglob("*.bin"), *folder.rglob("*.json"))
    for path in sorted(weights):
        with path.open("rb") as file:
            found.update(hashlib.file_digest(file, hashlib.blake2b).digest())
    return found.hexdigest()
