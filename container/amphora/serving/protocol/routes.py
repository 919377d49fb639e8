"""The routes of clients' APIs. Specs of the recipe's tasks name those that their models answer."""

from __future__ import annotations

CHAT, COMPLETIONS, EMBEDDINGS = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"
RESPONSES = "/v1/responses"
RERANK_1, RERANK_2 = "/v1/rerank", "/v2/rerank"
EMBED, RERANK, PREDICT = "/embed", "/rerank", "/predict"
GENERATE, GENERATE_STREAM = "/generate", "/generate_stream"

RANKING = (RERANK, RERANK_1, RERANK_2)
OPENAI = (CHAT, COMPLETIONS, EMBEDDINGS, RERANK_1, RERANK_2, RESPONSES)
"""OpenAI's API and what other servers have in its form."""
TEI = (EMBED, RERANK, PREDICT)
TGI = (GENERATE, GENERATE_STREAM)
CLIENTS = (*OPENAI, *TEI, *TGI)
