"""The laboratory: studies and analyses, their workers, tables and exports."""
