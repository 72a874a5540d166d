"""Results become text, HTML, Markdown, JSON, SARIF, pictures and notebooks; nothing is computed here that a rule could judge."""
