import { BatchTraceProcessor, setTraceProcessors, withTrace, withAgentSpan, withFunctionSpan, withResponseSpan, withGenerationSpan, withGuardrailSpan, withHandoffSpan, withCustomSpan, getGlobalTraceProvider } from '@openai/agents-core';
import { OpenAITracingExporter } from '@openai/agents-openai';
const exporter = new OpenAITracingExporter({ apiKey: process.env.STACK_KEY ?? 'none', endpoint: `${process.env.STACK_URL}/v1/traces/ingest` });
setTraceProcessors([new BatchTraceProcessor(exporter)]);
await withTrace('Homework', async () => {
  await withAgentSpan(async () => {
    await withResponseSpan(async (span) => { span.spanData.response_id = process.env.RESPONSE_ID; }, { data: { } });
    await withGenerationSpan(async () => {}, { data: { model: 'm', input: [{ role: 'user', content: 'hi' }], output: [{ role: 'assistant', content: 'hello' }], usage: { input_tokens: 1, output_tokens: 2 } } });
    await withFunctionSpan(async (span) => { span.setError({ message: 'no luck', data: { code: 7 } }); }, { data: { name: 'add', input: '{"a":1}', output: '2' } });
    await withGuardrailSpan(async () => {}, { data: { name: 'safe', triggered: false } });
    await withHandoffSpan(async () => {}, { data: { from_agent: 'A', to_agent: 'B' } });
    await withCustomSpan(async () => {}, { data: { name: 'mine', data: { any: [1, null, 'x'] } } });
  }, { data: { name: 'Tutor', tools: ['add'], handoffs: ['B'], output_type: 'text' } });
}, { groupId: 'chat-1', metadata: { user: 'u1' } });
await getGlobalTraceProvider().forceFlush();
