//! Ages in words, for the library and the program alike.

/// Seconds in the unit in which people say them.
pub(crate) fn age(seconds: f64) -> String {
    let units = [(86_400.0, "d"), (3_600.0, "h"), (60.0, "min")];
    match units.into_iter().find(|(unit, _)| seconds >= 2.0 * unit) {
        Some((unit, name)) => format!("{:.0} {name}", seconds / unit),
        None => format!("{:.1} s", seconds.max(0.0)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ages_are_said_in_the_unit_that_fits() {
        let said = [-0.2, 0.25, 119.0, 120.0, 7_199.0, 7_200.0, 172_800.0].map(age);
        assert_eq!(said, ["0.0 s", "0.2 s", "119.0 s", "2 min", "120 min", "2 h", "2 d"]);
    }
}
