// As calls.py, of JavaScript's clients: the same servers, the same form of what is printed.
import { InvokeEndpointCommand, SageMakerRuntimeClient } from "@aws-sdk/client-sagemaker-runtime";
import { InferenceClient } from "@huggingface/inference";
import { ChatOpenAI, OpenAIEmbeddings } from "@langchain/openai";
import { CohereClientV2 } from "cohere-ai";
import OpenAI from "openai";

const [CHATS, VECTORS, RANKS, LABELS, AWS] = process.argv.slice(2);
const QUERY = "who";
const TEXTS = ["the film was good", "anna said paris was bad again .", "who"];
const HELLO = [{ role: "user", content: "hi" }];
const chat = { model: "x", messages: HELLO, temperature: 0 };

const openai = (url) => new OpenAI({ baseURL: `${url}/v1`, apiKey: "none", maxRetries: 0 });
const hub = (url) => new InferenceClient("none", { endpointUrl: url });

async function joined(stream, text) {
  const pieces = [];
  for await (const piece of stream) pieces.push(text(piece) ?? "");
  return pieces.join("");
}

const CALLS = {
  openai_chat: async () => (await openai(CHATS).chat.completions.create(chat)).choices[0].message.content,
  openai_chat_stream: async () =>
    joined(await openai(CHATS).chat.completions.create({ ...chat, stream: true }), (chunk) => chunk.choices[0].delta.content),
  openai_embeddings: async () =>
    (await openai(VECTORS).embeddings.create({ model: "x", input: TEXTS })).data.map((entry) => entry.embedding),
  openai_tools: async () =>
    openai(CHATS).chat.completions.create({
      ...chat,
      tools: [{ type: "function", function: { name: "f", parameters: { type: "object" } } }],
    }),
  hub_text_generation: async () =>
    (await hub(CHATS).textGeneration({ inputs: "12", parameters: { max_new_tokens: 3, do_sample: false } })).generated_text,
  hub_text_generation_stream: async () =>
    joined(
      hub(CHATS).textGenerationStream({ inputs: "12", parameters: { max_new_tokens: 3, do_sample: false } }),
      (piece) => piece.choices[0].text, // It asks by /v1/completions.,
    ),
  hub_chat: async () => (await hub(CHATS).chatCompletion({ messages: HELLO, temperature: 0 })).choices[0].message.content,
  hub_feature_extraction: async () => hub(VECTORS).featureExtraction({ inputs: TEXTS }),
  hub_sentence_similarity: async () =>
    hub(VECTORS).sentenceSimilarity({ inputs: { source_sentence: TEXTS[0], sentences: TEXTS.slice(1) } }),
  hub_text_classification: async () =>
    (await hub(LABELS).textClassification({ inputs: TEXTS[0], parameters: { top_k: 2 } })).map((one) => [one.label, one.score]),
  cohere_rerank: async () =>
    (
      await new CohereClientV2({ token: "none", environment: RANKS }).rerank({ model: "x", query: QUERY, documents: TEXTS, topN: 2 })
    ).results.map((result) => [result.index, result.relevanceScore]),
  langchain_chat: async () =>
    (await new ChatOpenAI({ model: "x", apiKey: "none", temperature: 0, configuration: { baseURL: `${CHATS}/v1` } }).invoke("hi"))
      .content,
  langchain_embeddings: async () =>
    new OpenAIEmbeddings({ model: "x", apiKey: "none", configuration: { baseURL: `${VECTORS}/v1` } }).embedDocuments(TEXTS),
  aws_session: async () => {
    const credentials = { accessKeyId: "id", secretAccessKey: "key" };
    const answer = await new SageMakerRuntimeClient({ region: "eu-west-1", endpoint: AWS, credentials }).send(
      new InvokeEndpointCommand({
        EndpointName: "e",
        Body: TEXTS.map((text) => JSON.stringify({ inputs: text })).join("\n"),
        ContentType: "application/jsonlines",
        SessionId: "NEW_SESSION",
        CustomAttributes: "trace=1",
      }),
    );
    if (answer.CustomAttributes !== "trace=1") throw new Error(`custom attributes: ${answer.CustomAttributes}`);
    const entries = JSON.parse(new TextDecoder().decode(answer.Body));
    return entries.map((entry) => [entry.label, entry.score]);
  },
};

const outcomes = {};
for (const [name, call] of Object.entries(CALLS)) {
  try {
    outcomes[name] = { value: await call() };
  } catch (error) {
    outcomes[name] = { error: `${error.name}: ${error.message}` };
  }
}
console.log(JSON.stringify(outcomes));
