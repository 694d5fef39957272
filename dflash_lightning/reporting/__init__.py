"""Run folders -> statistics, tables, figures, a TensorBoard summary run. No torch in here."""
