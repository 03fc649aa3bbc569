use super::*;

fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::new(), |text, byte| text + &format!("{byte:02x}"))
}

fn request() -> SavedRequest {
    SavedRequest {
        model: "m".to_owned(),
        key: Some(3),
        created_unix: 1_790_000_000,
        on_leave: OnLeave::Background,
        prompt: vec![1, 300, 49_151],
        sampling: SavedSampling {
            temperature: 0.5,
            top_p: 1.0,
            top_k: Some(40),
            seed: u64::MAX,
            logprobs: Some(5),
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            repetition_penalty: 1.0,
        },
        n: 2,
        max_tokens: 128,
        stop_ids: vec![2],
        context: b"ctx".to_vec(),
    }
}

fn steps() -> Vec<StepEntry> {
    vec![
        StepEntry { behind: 7, entry: Entry::Token { choice: 0, token: 49_151 } },
        StepEntry { behind: -2, entry: Entry::Finish { choice: 1, reason: Finish::Failed } },
        StepEntry { behind: 0, entry: Entry::End { cached_tokens: 16 } },
    ]
}

/// A change of any of these needs another [`VERSION`], and a reader for the old one.
#[test]
fn version_2_is_written_as_it_always_was() {
    assert_eq!(VERSION, 2);
    let request = seal(&request()).unwrap();
    let steps = seal(&steps()).unwrap();
    assert_eq!(
        hex(&request),
        "02016d010380f7c4d506020301ac02ffff020000003f0000803f0128ffffffffffffffffff01010500000000000000000000803f028001010203637478115ab7f626d034b2"
    );
    assert_eq!(hex(&steps), "02030e0000ffff0203010103000210212958971d12b64e");
}

#[test]
fn version_1_is_read_and_had_no_penalties() {
    let bytes = |hex: &str| -> Vec<u8> {
        (0..hex.len()).step_by(2).map(|at| u8::from_str_radix(&hex[at..at + 2], 16).unwrap()).collect()
    };
    let saved = bytes(
        "01016d010380f7c4d506020301ac02ffff020000003f0000803f0128ffffffffffffffffff01010502800101020363747896203d0469df4988",
    );
    assert_eq!(unseal::<SavedRequest>(&saved).unwrap(), request());
    let saved = bytes("01030e0000ffff020301010300021012aff2e06b16af3c");
    assert_eq!(unseal::<Vec<StepEntry>>(&saved).unwrap(), steps());
}

#[test]
fn what_was_saved_is_read_back() {
    assert_eq!(unseal::<SavedRequest>(&seal(&request()).unwrap()).unwrap(), request());
    assert_eq!(unseal::<Vec<StepEntry>>(&seal(&steps()).unwrap()).unwrap(), steps());
}

#[test]
fn no_changed_bit_and_no_missing_byte_goes_unseen() {
    let whole = seal(&request()).unwrap();
    for i in 0..whole.len() {
        assert_eq!(unseal::<SavedRequest>(&whole[..i]), Err(SavedError::Checksum), "cut at {i}");
        for bit in 0..8 {
            let mut bytes = whole.clone();
            bytes[i] ^= 1 << bit;
            assert_eq!(unseal::<SavedRequest>(&bytes), Err(SavedError::Checksum), "byte {i}");
        }
    }
}

#[test]
fn a_newer_encoding_and_one_of_something_else_are_named() {
    let mut bytes = vec![VERSION + 1, 0, 0];
    let checksum = blake3::hash(&bytes);
    bytes.extend_from_slice(&checksum.as_bytes()[..CHECKSUM]);
    let newer = SavedError::Version { found: VERSION + 1, known: VERSION };
    assert_eq!(unseal::<Vec<StepEntry>>(&bytes), Err(newer));
    let other = seal("text").unwrap();
    assert!(matches!(unseal::<Vec<StepEntry>>(&other), Err(SavedError::Decode(_))));
}
