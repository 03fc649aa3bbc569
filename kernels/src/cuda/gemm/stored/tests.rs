use super::*;

fn algorithms() -> Algorithms {
    let kept = |inputs, outputs, bucket, output, word: u64| {
        let types = Types { inputs: cudaDataType::CUDA_R_16BF, output };
        let key = Key { shape: GemmShape { inputs, outputs }, bucket, types };
        Kept { key, algorithm: Algorithm(std::array::from_fn(|i| word << 48 | i as u64)) }
    };
    let (half, single) = (cudaDataType::CUDA_R_16BF, cudaDataType::CUDA_R_32F);
    let place = Place { library: 130_002, gpu: "NVIDIA H200".to_owned(), multiprocessors: 132 };
    let list = vec![
        kept(4096, 6144, 64, half, 3),
        kept(4096, 6144, 1, half, 1),
        kept(4096, 128_256, 1, single, 4),
        kept(576, 64, 8192, half, 2),
        kept(576, 64, 320, half, 5),
    ];
    Algorithms::new(place, list)
}

fn with_checksum(mut body: Vec<u8>) -> Vec<u8> {
    let sum = checksum(&body);
    body.extend(sum.to_le_bytes());
    body
}

#[test]
fn stored_algorithms_are_read_as_they_were_kept_and_in_one_order() {
    let kept = algorithms();
    let bytes = kept.to_bytes();
    assert_eq!(Algorithms::from_bytes(&bytes).as_ref(), Ok(&kept));
    let reversed = Algorithms::new(kept.place.clone(), kept.kept.iter().rev().copied().collect());
    assert_eq!(reversed.to_bytes(), bytes);
    let none = Algorithms::new(kept.place.clone(), Vec::new());
    assert_eq!(Algorithms::from_bytes(&none.to_bytes()), Ok(none));
    assert_eq!((kept.len(), kept.is_empty(), kept.kept[0].key.shape.inputs), (5, false, 576));
}

#[test]
fn any_byte_changed_cut_off_or_added_is_told() {
    let bytes = algorithms().to_bytes();
    for at in 0..bytes.len() {
        let mut changed = bytes.clone();
        changed[at] ^= 0x10;
        let answer = Algorithms::from_bytes(&changed);
        assert!(matches!(answer, Err(AlgorithmsError::Damaged { .. })), "byte {at}: {answer:?}");
        let answer = Algorithms::from_bytes(&bytes[..at]);
        assert!(matches!(answer, Err(AlgorithmsError::Damaged { .. })), "{at} bytes: {answer:?}");
    }
    let longer = [&bytes[..], &[0]].concat();
    assert!(Algorithms::from_bytes(&longer).is_err());
}

#[test]
fn sizes_and_types_that_no_product_has_are_told_also_with_a_right_checksum() {
    let bytes = algorithms().to_bytes();
    let body = &bytes[..bytes.len() - 8];
    let entry = body.len() - ENTRY;
    // Inputs, outputs, bucket, both types, in the last entry.
    for (at, value) in [(0, 4095_u32), (8, 0), (16, 3), (16, 300), (16, 640), (24, 0), (24, 99), (28, 99)] {
        let mut changed = body.to_vec();
        changed[entry + at..][..4].copy_from_slice(&value.to_le_bytes());
        let answer = Algorithms::from_bytes(&with_checksum(changed));
        assert!(matches!(answer, Err(AlgorithmsError::Damaged { .. })), "{value} at {at}: {answer:?}");
    }
    let mut fewer = body.to_vec();
    fewer.truncate(entry);
    assert!(Algorithms::from_bytes(&with_checksum(fewer)).is_err(), "an entry less than was said");
    let mut newer = body.to_vec();
    newer[8] += 1;
    let text =
        Algorithms::from_bytes(&with_checksum(newer)).map(drop).expect_err("another version").to_string();
    assert_eq!(text, "the kept algorithms are damaged: they are of another version");
}

#[test]
fn a_list_of_another_place_names_both() {
    let theirs = algorithms().place.to_string();
    let ours = Place { library: 130_100, ..algorithms().place }.to_string();
    let text = AlgorithmsError::Elsewhere { theirs, ours }.to_string();
    assert!(text.contains("cuBLASLt 130002 on \"NVIDIA H200\" of 132 multiprocessors"), "{text}");
    assert!(text.contains("130100") && text.lines().count() == 1, "{text}");
}

#[test]
fn every_number_of_rows_is_in_a_bucket_that_is_its_own() {
    for rows in 1..3000 {
        let most = bucket(rows);
        assert!(most >= rows && bucket(most) == most && (most < 2 * rows || rows == 1), "{rows} in {most}");
    }
    assert_eq!(
        [128, 129, 192, 255, 257, 320, 449, 513].map(bucket),
        [128, 192, 192, 256, 320, 320, 512, 1024]
    );
    assert_eq!(bucket(usize::MAX), usize::MAX);
}
