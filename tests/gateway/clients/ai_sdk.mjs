// Vercel's AI SDK: `--api` chooses provider and API, `--output` how a structured answer is asked for.

import { parseArgs } from "node:util";
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateObject, generateText, Output, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const { values: args, positionals } = parseArgs({
  allowPositionals: true,
  options: {
    api: { type: "string", default: "responses" },
    stream: { type: "boolean", default: false },
    output: { type: "string", default: "text" },
  },
});
const { OPENAI_BASE_URL, OPENAI_API_KEY, ANTHROPIC_BASE_URL } = process.env;
const compatible = { name: "graft", baseURL: OPENAI_BASE_URL, apiKey: OPENAI_API_KEY };
const strict = { ...compatible, supportsStructuredOutputs: true };
const models = {
  responses: () => createOpenAI().responses("policy"),
  chat: () => createOpenAI().chat("policy"),
  compatible: () => createOpenAICompatible(compatible)("policy"),
  "compatible-strict": () => createOpenAICompatible(strict)("policy"),
  anthropic: () => createAnthropic({ baseURL: `${ANTHROPIC_BASE_URL}/v1` })("policy"),
};
const model = models[args.api]();
const [prompt] = positionals;
const schema = z.object({ value: z.number().int() });
const inputSchema = z.object({ a: z.number(), b: z.number() });
const tools = {
  add: tool({ description: "Add.", inputSchema, execute: async ({ a, b }) => a + b }),
  multiply: tool({ description: "Multiply.", inputSchema, execute: async ({ a, b }) => a * b }),
};
const system = "You calculate with tools.";
const request = { model, system, prompt, tools, stopWhen: stepCountIs(5), maxRetries: 0 };

if (args.output === "object") {
  const { object } = await generateObject({ model, prompt, schema, maxRetries: 0 });
  console.log(`The answer is ${object.value}.`);
} else if (args.output === "tools-and-object") {
  const { output } = await generateText({ ...request, output: Output.object({ schema }) });
  console.log(`The answer is ${output.value}.`);
} else if (args.stream) {
  console.log(await streamText(request).text);
} else {
  console.log((await generateText(request)).text);
}
