"""From spans to names: the account, the bubbles, the waterfall, the critical path and causes."""
