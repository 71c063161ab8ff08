"""The mathematics, one step at a time: objectives, closed forms, the cost of the diagonal form."""
