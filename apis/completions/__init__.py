"""Text completions, OpenAI's older API without messages: a model continues prompts as they are."""
