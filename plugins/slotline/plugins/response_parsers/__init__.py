"""Response parsers: what the text of an answer means as reasoning, content and tool calls, one for each form."""
