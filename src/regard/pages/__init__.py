"""How pages look: theme, charts, templates."""
