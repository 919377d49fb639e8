"""Calls of Python's clients to four servers, whose addresses are the arguments: chats, vectors,
ranks, labels, and aws, which stands in for SageMaker's runtime before the labels.

Runs in an environment of its own (tests/sdk_venvs.sh clients). The last line that it prints is what
each call returns, or its error, as JSON.
"""

import json
import sys
from collections.abc import Callable, Iterable
from typing import Any

CHATS, VECTORS, RANKS, LABELS, AWS = sys.argv[1:]
QUERY, TEXTS = "who", ["the film was good", "anna said paris was bad again .", "who"]
HELLO = [{"role": "user", "content": "hi"}]
CALLS: dict[str, Callable[[], Any]] = {}


def call(function: Callable[[], Any]) -> Callable[[], Any]:
    CALLS[function.__name__] = function
    return function


def openai(url: str) -> Any:
    from openai import OpenAI

    return OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


def ranking(results: Iterable[Any]) -> list[list[Any]]:
    return [[result.index, result.relevance_score] for result in results]


@call
def openai_chat() -> Any:
    answer = openai(CHATS).chat.completions.create(model="x", messages=HELLO, temperature=0)
    return answer.choices[0].message.content


@call
def openai_chat_stream() -> Any:
    chunks = openai(CHATS).chat.completions.create(
        model="x", messages=HELLO, temperature=0, stream=True
    )
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks)


@call
def openai_chat_of_invocations() -> Any:
    """As for an address that ends in /invocations."""
    from openai import OpenAI

    client = OpenAI(base_url=f"{CHATS}/invocations/v1", api_key="none")
    answer = client.chat.completions.create(model="x", messages=HELLO, temperature=0)
    return answer.choices[0].message.content


@call
def openai_completion() -> Any:
    answer = openai(CHATS).completions.create(model="x", prompt="12", max_tokens=3, temperature=0)
    return answer.choices[0].text


@call
def openai_embeddings() -> Any:
    answer = openai(VECTORS).embeddings.create(model="x", input=TEXTS)
    return [entry.embedding for entry in answer.data]


@call
def openai_tools() -> Any:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    return openai(CHATS).chat.completions.create(model="x", messages=HELLO, tools=[tool])


@call
def openai_json_schema() -> Any:
    schema = {"name": "s", "schema": {"type": "object"}}
    return openai(CHATS).chat.completions.create(
        model="x", messages=HELLO, response_format={"type": "json_schema", "json_schema": schema}
    )


@call
def openai_responses() -> Any:
    return openai(CHATS).responses.create(model="x", input="hi")


@call
def hub_text_generation() -> Any:
    from huggingface_hub import InferenceClient

    client = InferenceClient(CHATS)
    whole = client.text_generation("12", max_new_tokens=3)
    return [whole, *client.text_generation("12", max_new_tokens=3, stream=True)]


@call
def hub_chat() -> Any:
    from huggingface_hub import InferenceClient

    answer = InferenceClient(CHATS).chat_completion(HELLO, temperature=0)
    return answer.choices[0].message.content


@call
def hub_feature_extraction() -> Any:
    from huggingface_hub import InferenceClient

    return InferenceClient(VECTORS).feature_extraction(TEXTS[0], normalize=True).ravel().tolist()


@call
def hub_sentence_similarity() -> Any:
    from huggingface_hub import InferenceClient

    return InferenceClient(VECTORS).sentence_similarity(TEXTS[0], TEXTS[1:])


@call
def hub_text_classification() -> Any:
    from huggingface_hub import InferenceClient

    labels = InferenceClient(LABELS).text_classification(TEXTS[0], top_k=2)
    return [[label.label, label.score] for label in labels]


@call
def cohere_rerank() -> Any:
    from cohere import ClientV2

    client = ClientV2("none", base_url=RANKS)
    return ranking(client.rerank(model="x", query=QUERY, documents=TEXTS, top_n=2).results)


@call
def cohere_rerank_1() -> Any:
    from cohere import Client

    client = Client("none", base_url=RANKS)
    documents: Any = [{"text": text} for text in TEXTS]
    answer = client.rerank(model="x", query=QUERY, documents=documents, return_documents=True)
    assert [result.document.text for result in answer.results] == [
        TEXTS[result.index] for result in answer.results
    ]
    return ranking(answer.results)


@call
def cohere_chat() -> Any:
    from cohere import ClientV2

    return ClientV2("none", base_url=CHATS).chat(model="x", messages=HELLO)


@call
def langchain_chat() -> Any:
    from langchain_openai import ChatOpenAI

    model = ChatOpenAI(base_url=f"{CHATS}/v1", api_key="none", model="x", temperature=0)
    return [model.invoke("hi").content, "".join(chunk.content for chunk in model.stream("hi"))]


@call
def langchain_embeddings() -> Any:
    from langchain_openai import OpenAIEmbeddings

    model = OpenAIEmbeddings(
        base_url=f"{VECTORS}/v1", api_key="none", model="x", check_embedding_ctx_length=False
    )
    return model.embed_documents(TEXTS)


@call
def langchain_huggingface() -> Any:
    from langchain_huggingface import HuggingFaceEndpoint

    model = HuggingFaceEndpoint(endpoint_url=CHATS, max_new_tokens=3, task="text-generation")
    return model.invoke("12")


@call
def langchain_cohere_rerank() -> Any:
    from langchain_cohere import CohereRerank

    ranker = CohereRerank(model="x", cohere_api_key="none", base_url=RANKS, top_n=2)
    results = ranker.rerank(TEXTS, QUERY)
    return [[result["index"], result["relevance_score"]] for result in results]


@call
def llama_index_chat() -> Any:
    from llama_index.core.llms import ChatMessage
    from llama_index.llms.openai_like import OpenAILike

    model = OpenAILike(
        api_base=f"{CHATS}/v1", api_key="none", model="x", is_chat_model=True, temperature=0
    )
    pieces = model.stream_chat([ChatMessage(content="hi")])
    return [
        model.chat([ChatMessage(content="hi")]).message.content,
        "".join(piece.delta or "" for piece in pieces),
    ]


@call
def llama_index_complete() -> Any:
    from llama_index.llms.openai_like import OpenAILike

    model = OpenAILike(
        api_base=f"{CHATS}/v1", api_key="none", model="x", temperature=0, max_tokens=3
    )
    return model.complete("12").text


@call
def llama_index_embeddings() -> Any:
    from llama_index.embeddings.openai_like import OpenAILikeEmbedding

    model = OpenAILikeEmbedding(model_name="x", api_base=f"{VECTORS}/v1", api_key="none")
    return model.get_text_embedding_batch(TEXTS)


@call
def llama_index_rerank() -> Any:
    from llama_index.core.schema import NodeWithScore, TextNode
    from llama_index.postprocessor.cohere_rerank import CohereRerank

    nodes = [NodeWithScore(node=TextNode(text=text, id_=str(i))) for i, text in enumerate(TEXTS)]
    ranker = CohereRerank(model="x", api_key="none", base_url=RANKS, top_n=2)
    ranked = ranker.postprocess_nodes(nodes, query_str=QUERY)
    return [[int(node.node_id), node.score] for node in ranked]


@call
def haystack_chat() -> Any:
    from haystack.components.generators.chat import OpenAIChatGenerator
    from haystack.dataclasses import ChatMessage
    from haystack.utils import Secret

    generator = OpenAIChatGenerator(
        api_key=Secret.from_token("none"), model="x", api_base_url=f"{CHATS}/v1",
        generation_kwargs={"temperature": 0},
    )  # fmt: skip
    return generator.run([ChatMessage.from_user("hi")])["replies"][0].text


@call
def haystack_embeddings() -> Any:
    from haystack import Document
    from haystack.components.embedders import OpenAIDocumentEmbedder
    from haystack.utils import Secret

    embedder = OpenAIDocumentEmbedder(
        api_key=Secret.from_token("none"), model="x", api_base_url=f"{VECTORS}/v1",
        progress_bar=False,
    )  # fmt: skip
    documents = embedder.run([Document(content=text) for text in TEXTS])["documents"]
    return [document.embedding for document in documents]


@call
def litellm_chat() -> Any:
    from litellm import completion

    options: Any = {"api_base": f"{CHATS}/v1", "api_key": "none", "temperature": 0}
    whole = completion("openai/x", HELLO, **options).choices[0].message.content
    chunks = completion("hosted_vllm/x", HELLO, stream=True, **options)
    return [whole, "".join(chunk.choices[0].delta.content or "" for chunk in chunks)]


@call
def litellm_embedding() -> Any:
    from litellm import embedding

    answer = embedding("openai/x", TEXTS, api_base=f"{VECTORS}/v1", api_key="none")
    return [entry["embedding"] for entry in answer.data]


def litellm_rerank(provider: str, url: str = RANKS, **more: Any) -> Any:
    from litellm import rerank

    options: Any = {"api_base": url, "api_key": "none", "top_n": 2, **more}
    answer = rerank(f"{provider}/x", QUERY, TEXTS, **options)
    return [[result["index"], result["relevance_score"]] for result in answer.results]


@call
def litellm_rerank_cohere() -> Any:
    return litellm_rerank("cohere")


@call
def litellm_rerank_infinity() -> Any:
    return litellm_rerank("infinity", return_documents=False)


@call
def litellm_rerank_vllm() -> Any:
    return litellm_rerank("hosted_vllm")


@call
def litellm_rerank_jina() -> Any:
    return litellm_rerank("jina_ai", f"{RANKS}/v1/rerank")


@call
def litellm_rerank_tei() -> Any:
    return litellm_rerank("huggingface")


@call
def boto3_session() -> Any:
    """With a session and custom attributes, as JSON and as CSV."""
    import boto3

    client = boto3.client("sagemaker-runtime", endpoint_url=AWS, region_name="eu-west-1",
                          aws_access_key_id="id", aws_secret_access_key="key")  # fmt: skip
    answer = client.invoke_endpoint(
        EndpointName="e", Body=json.dumps({"inputs": TEXTS}), ContentType="application/json",
        SessionId="NEW_SESSION", CustomAttributes="trace=1",
    )  # fmt: skip
    assert answer["CustomAttributes"] == "trace=1"
    rows = "\n".join(TEXTS).encode()
    table = client.invoke_endpoint(
        EndpointName="e", Body=rows, ContentType="text/csv; header=absent", Accept="text/csv"
    )
    labels = [line.split(",") for line in table["Body"].read().decode().splitlines()]
    assert [label for label, _ in labels] == [entry["label"] for entry in json.load(answer["Body"])]
    return [[label, float(score)] for label, score in labels]


@call
def boto3_stream() -> Any:
    """The tokens of a stream, whose lines are cut anywhere by its parts."""
    import boto3

    client = boto3.client("sagemaker-runtime", endpoint_url=AWS, region_name="eu-west-1",
                          aws_access_key_id="id", aws_secret_access_key="key")  # fmt: skip
    body = {"inputs": "12", "parameters": {"max_new_tokens": 3}, "stream": True}
    answer = client.invoke_endpoint_with_response_stream(
        EndpointName="e", Body=json.dumps(body), ContentType="application/json"
    )
    assert answer["ContentType"].startswith("text/event-stream")
    whole = b"".join(event["PayloadPart"]["Bytes"] for event in answer["Body"]).decode()
    lines = [line.removeprefix("data:") for line in whole.splitlines() if line]
    return "".join(json.loads(line)["token"]["text"] for line in lines)


def outcome(function: Callable[[], Any]) -> dict[str, Any]:
    try:
        return {"value": function()}
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}


# On a line of its own: LiteLLM prints, too.
print("\n" + json.dumps({name: outcome(function) for name, function in CALLS.items()}))
