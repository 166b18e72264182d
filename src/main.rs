//! The `workpump` program.

fn main() {}
