"""Between text and token ids: tokenizers, chat templates, parsers, grammars, generation."""
