use super::*;

#[test]
fn every_form_fits_a_block_with_all_inputs_that_it_is_chosen_for() {
    for inputs in (UNIT..=32_768).step_by(UNIT) {
        for rows in 1..=MOST_ROWS {
            for normed in [false, true] {
                let form = Form::of(inputs, rows, normed);
                let shared = form.map_or(0, |form| form.shared_with(inputs, rows));
                assert!(
                    shared <= SHARED,
                    "{rows} rows of {inputs}, normed {normed}: {form:?}, {shared} bytes"
                );
            }
        }
    }
}

#[test]
fn inputs_stay_in_shared_memory_where_they_fit_and_go_through_the_ring_else() {
    let form = |inputs, rows| Form::of(inputs, rows, false);
    assert_eq!(form(4096, 1), Some(Form::Kept));
    assert_eq!(form(4096, 8), Some(Form::Kept));
    assert_eq!(form(14_336, 2), Some(Form::Kept));
    assert_eq!(form(14_336, 8), Some(Form::Streamed));
    assert_eq!(form(4096, 16), Some(Form::Kept16));
    assert_eq!(form(14_336, 16), Some(Form::Streamed16));
    assert_eq!(form(576, 4), Some(Form::Kept));
    assert_eq!(form(576, 8), Some(Form::Streamed));
    assert_eq!(form(576, 16), Some(Form::Streamed16));
}

#[test]
fn more_rows_other_widths_and_none_are_not_taken() {
    for (inputs, rows) in [(4096, 17), (4096, 0), (0, 1), (4104, 1), (32, 1)] {
        assert_eq!(Form::of(inputs, rows, false), None, "{rows} rows of {inputs}");
    }
    assert_eq!(Form::of(4096, 2, true), Some(Form::Normed));
    assert_eq!(Form::of(4096, 3, true), None);
    assert_eq!(Form::of(8256, 1, true), None);
}
