"""Pure planning: sizes, frames, times and token counts from facts about a medium."""
