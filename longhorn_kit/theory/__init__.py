"""The mathematics, one step at a time: objectives, closed forms, and what the diagonal approximation costs."""
