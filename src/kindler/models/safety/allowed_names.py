"""What files of strangers may name without trust. Names, and nothing else.

What a later release adds needs trust until it is named here.
"""

from __future__ import annotations

# Operations of TensorFlow: they compute, choose between branches, call functions of the same graph, or keep
# state of the model's own: variables, tables, random generators. Left out on purpose, although they look
# harmless: what takes the name of a file as an attribute (FixedUnigramCandidateSampler, Skipgram,
# DecodeProtoV2, ImmutableConst), what turns a string into a graph or into handles (DatasetFromGraph,
# XlaCallModule, ParseTensor), what reaches the state of others by name (queues, stages, sessions, barriers),
# and all of tf.data.
_TF_OPERATIONS = """
    Abs AccumulateNV2 Acos Acosh Add AddN AddV2 AdjustContrast AdjustContrastv2 AdjustHue
    AdjustSaturation All AllCandidateSampler Angle AnonymousHashTable AnonymousMutableDenseHashTable
    AnonymousMutableHashTable AnonymousMutableHashTableOfTensors Any ApplyAdaMax ApplyAdadelta
    ApplyAdagrad ApplyAdagradDA ApplyAdagradV2 ApplyAdam ApplyAddSign ApplyCenteredRMSProp ApplyFtrl
    ApplyFtrlV2 ApplyGradientDescent ApplyMomentum ApplyPowerSign ApplyProximalAdagrad
    ApplyProximalGradientDescent ApplyRMSProp ApproxTopK ApproximateEqual ArgMax ArgMin AsString Asin
    Asinh Assert Assign AssignAdd AssignAddVariableOp AssignSub AssignSubVariableOp AssignVariableOp
    Atan Atan2 Atanh AudioSpectrogram AvgPool AvgPool3D AvgPool3DGrad AvgPoolGrad BandedTriangularSolve
    BatchCholesky BatchCholeskyGrad BatchFFT BatchFFT2D BatchFFT3D BatchIFFT BatchIFFT2D BatchIFFT3D
    BatchMatMul BatchMatMulV2 BatchMatMulV3 BatchMatrixBandPart BatchMatrixDeterminant BatchMatrixDiag
    BatchMatrixDiagPart BatchMatrixInverse BatchMatrixSetDiag BatchMatrixSolve BatchMatrixSolveLs
    BatchMatrixTriangularSolve BatchNormWithGlobalNormalization BatchNormWithGlobalNormalizationGrad
    BatchSelfAdjointEig BatchSelfAdjointEigV2 BatchSvd BatchToSpace BatchToSpaceND BesselI0 BesselI0e
    BesselI1 BesselI1e BesselJ0 BesselJ1 BesselK0 BesselK0e BesselK1 BesselK1e BesselY0 BesselY1 Betainc
    BiasAdd BiasAddGrad BiasAddV1 Bincount Bitcast BitwiseAnd BitwiseOr BitwiseXor BlockLSTM
    BlockLSTMGrad BlockLSTMGradV2 BlockLSTMV2 BroadcastArgs BroadcastGradientArgs BroadcastTo Bucketize
    CSRSparseMatrixComponents CSRSparseMatrixToDense CSRSparseMatrixToSparseTensor CTCBeamSearchDecoder
    CTCGreedyDecoder CTCLoss CTCLossV2 Case Cast Ceil CheckNumerics CheckNumericsV2 Cholesky
    CholeskyGrad ClipByValue CombinedNonMaxSuppression Complex ComplexAbs ComputeAccidentalHits Concat
    ConcatOffset ConcatV2 Conj ConjugateTranspose Const ControlTrigger Conv Conv2D Conv2DBackpropFilter
    Conv2DBackpropFilterV2 Conv2DBackpropInput Conv2DBackpropInputV2 Conv3D Conv3DBackpropFilter
    Conv3DBackpropFilterV2 Conv3DBackpropInput Conv3DBackpropInputV2 Cos Cosh CountUpTo CropAndResize
    CropAndResizeGradBoxes CropAndResizeGradImage Cross CudnnRNN CudnnRNNBackprop CudnnRNNBackpropV2
    CudnnRNNBackpropV3 CudnnRNNCanonicalToParams CudnnRNNCanonicalToParamsV2 CudnnRNNParamsSize
    CudnnRNNParamsToCanonical CudnnRNNParamsToCanonicalV2 CudnnRNNV2 CudnnRNNV3 Cumprod Cumsum
    CumulativeLogsumexp DataFormatDimMap DataFormatVecPermute Dawsn DecodeAndCropJpeg DecodeBase64
    DecodeBmp DecodeCSV DecodeGif DecodeImage DecodeJSONExample DecodeJpeg DecodeJxl DecodePaddedRaw
    DecodePng DecodeRaw DecodeWav DecodeWebP DeepCopy DenseBincount DenseCountSparseOutput
    DenseToCSRSparseMatrix DenseToDenseSetOperation DenseToSparseSetOperation DepthToSpace
    DepthwiseConv2dNative DepthwiseConv2dNativeBackpropFilter DepthwiseConv2dNativeBackpropInput
    Dequantize DestroyResourceOp DeviceIndex Diag DiagPart Digamma Dilation2D Dilation2DBackpropFilter
    Dilation2DBackpropInput DisableCopyOnRead Div DivNoNan DrawBoundingBoxes DrawBoundingBoxesV2
    DynamicPartition DynamicStitch EditDistance Eig Einsum Elu EluGrad Empty EmptyTensorList
    EncodeBase64 EncodeJpeg EncodeJpegVariableQuality EncodePng EncodeWav EnsureShape Enter Equal Erf
    Erfc Erfinv EuclideanNorm Exit Exp ExpandDims Expint Expm1 ExtractGlimpse ExtractGlimpseV2
    ExtractImagePatches ExtractJpegShape ExtractVolumePatches FFT FFT2D FFT3D FFTND FakeParam
    FakeQuantWithMinMaxArgs FakeQuantWithMinMaxArgsGradient FakeQuantWithMinMaxVars
    FakeQuantWithMinMaxVarsGradient FakeQuantWithMinMaxVarsPerChannel
    FakeQuantWithMinMaxVarsPerChannelGradient Fill Fingerprint Floor FloorDiv FloorMod For
    FractionalAvgPool FractionalAvgPoolGrad FractionalMaxPool FractionalMaxPoolGrad FresnelCos
    FresnelSin FusedBatchNorm FusedBatchNormGrad FusedBatchNormGradV2 FusedBatchNormGradV3
    FusedBatchNormV2 FusedBatchNormV3 FusedPadConv2D FusedResizeAndPadConv2D GRUBlockCell
    GRUBlockCellGrad Gather GatherNd GatherV2 GenerateBoundingBoxProposals Greater GreaterEqual
    GuaranteeConst HSVToRGB HashTable HashTableV2 HistogramFixedWidth HostConst IFFT IFFT2D IFFT3D
    IFFTND IRFFT IRFFT2D IRFFT3D IRFFTND Identity IdentityN If Igamma IgammaGradA Igammac Imag
    ImageProjectiveTransformV2 ImageProjectiveTransformV3 InTopK InTopKV2 InitializeTable
    InitializeTableV2 InplaceAdd InplaceSub InplaceUpdate Inv InvGrad Invert InvertPermutation IsFinite
    IsInf IsNan IsVariableInitialized IsotonicRegression KMC2ChainInitialization
    KmeansPlusPlusInitialization KthOrderStatistic L2Loss LRN LRNGrad LSTMBlockCell LSTMBlockCellGrad
    LeakyRelu LeakyReluGrad LearnedUnigramCandidateSampler LeftShift Less LessEqual Lgamma LinSpace
    ListDiff Log Log1p LogMatrixDeterminant LogSoftmax LogUniformCandidateSampler LogicalAnd LogicalNot
    LogicalOr LookupTableExport LookupTableExportV2 LookupTableFind LookupTableFindV2 LookupTableImport
    LookupTableImportV2 LookupTableInsert LookupTableInsertV2 LookupTableRemoveV2 LookupTableSize
    LookupTableSizeV2 LoopCond LowerBound Lu MatMul MatrixBandPart MatrixDeterminant MatrixDiag
    MatrixDiagPart MatrixDiagPartV2 MatrixDiagPartV3 MatrixDiagV2 MatrixDiagV3 MatrixExponential
    MatrixInverse MatrixLogarithm MatrixSetDiag MatrixSetDiagV2 MatrixSetDiagV3 MatrixSolve
    MatrixSolveLs MatrixSquareRoot MatrixTriangularSolve Max MaxPool MaxPool3D MaxPool3DGrad
    MaxPool3DGradGrad MaxPoolGrad MaxPoolGradGrad MaxPoolGradGradV2 MaxPoolGradGradWithArgmax
    MaxPoolGradV2 MaxPoolGradWithArgmax MaxPoolV2 MaxPoolWithArgmax Maximum Mean Merge Mfcc Min Minimum
    MirrorPad MirrorPadGrad Mod Mul MulNoNan Multinomial MutableDenseHashTable MutableDenseHashTableV2
    MutableHashTable MutableHashTableOfTensors MutableHashTableOfTensorsV2 MutableHashTableV2 Ndtri
    NearestNeighbors Neg NextAfter NextIteration NoOp NonDeterministicInts NonMaxSuppression
    NonMaxSuppressionV2 NonMaxSuppressionV3 NonMaxSuppressionV4 NonMaxSuppressionV5
    NonMaxSuppressionWithOverlaps NotEqual NthElement OneHot OnesLike OptionalFromValue OptionalGetValue
    OptionalHasValue OptionalNone Pack Pad PadV2 ParallelDynamicStitch ParameterizedTruncatedNormal
    ParseExample ParseExampleV2 ParseSequenceExample ParseSequenceExampleV2 ParseSingleExample
    ParseSingleSequenceExample PartitionedCall Placeholder PlaceholderV2 PlaceholderWithDefault
    Polygamma PopulationCount Pow PreventGradient Prod Qr QuantizeAndDequantize QuantizeAndDequantizeV2
    QuantizeAndDequantizeV3 QuantizeAndDequantizeV4 QuantizeAndDequantizeV4Grad
    QuantizeDownAndShrinkRange QuantizeV2 QuantizedAdd QuantizedAvgPool
    QuantizedBatchNormWithGlobalNormalization QuantizedBiasAdd QuantizedConcat QuantizedConcatV2
    QuantizedConv2D QuantizedConv2DAndRelu QuantizedConv2DAndReluAndRequantize
    QuantizedConv2DAndRequantize QuantizedConv2DPerChannel QuantizedConv2DWithBias
    QuantizedConv2DWithBiasAndRelu QuantizedConv2DWithBiasAndReluAndRequantize
    QuantizedConv2DWithBiasAndRequantize QuantizedConv2DWithBiasSignedSumAndReluAndRequantize
    QuantizedConv2DWithBiasSumAndRelu QuantizedConv2DWithBiasSumAndReluAndRequantize
    QuantizedDepthwiseConv2D QuantizedDepthwiseConv2DWithBias QuantizedDepthwiseConv2DWithBiasAndRelu
    QuantizedDepthwiseConv2DWithBiasAndReluAndRequantize QuantizedInstanceNorm QuantizedMatMul
    QuantizedMatMulWithBias QuantizedMatMulWithBiasAndDequantize QuantizedMatMulWithBiasAndRelu
    QuantizedMatMulWithBiasAndReluAndRequantize QuantizedMatMulWithBiasAndRequantize QuantizedMaxPool
    QuantizedMul QuantizedRelu QuantizedRelu6 QuantizedReluX QuantizedReshape QuantizedResizeBilinear
    RFFT RFFT2D RFFT3D RFFTND RGBToHSV RaggedBincount RaggedCountSparseOutput RaggedCross
    RaggedFillEmptyRows RaggedFillEmptyRowsGrad RaggedGather RaggedRange RaggedTensorFromVariant
    RaggedTensorToSparse RaggedTensorToTensor RaggedTensorToVariant RaggedTensorToVariantGradient
    RandomCrop RandomGamma RandomGammaGrad RandomIndexShuffle RandomPoisson RandomPoissonV2
    RandomShuffle RandomStandardNormal RandomUniform RandomUniformInt Range Rank ReadVariableOp Real
    RealDiv Reciprocal ReciprocalGrad ReduceJoin RefEnter RefExit RefIdentity RefMerge RefNextIteration
    RefSelect RefSwitch RegexFullMatch RegexReplace Relu Relu6 Relu6Grad ReluGrad RequantizationRange
    RequantizationRangePerChannel Requantize RequantizePerChannel Reshape ResizeArea ResizeBicubic
    ResizeBicubicGrad ResizeBilinear ResizeBilinearGrad ResizeNearestNeighbor ResizeNearestNeighborGrad
    ResourceApplyAdaMax ResourceApplyAdadelta ResourceApplyAdagrad ResourceApplyAdagradDA
    ResourceApplyAdagradV2 ResourceApplyAdam ResourceApplyAdamWithAmsgrad ResourceApplyAddSign
    ResourceApplyCenteredRMSProp ResourceApplyFtrl ResourceApplyFtrlV2 ResourceApplyGradientDescent
    ResourceApplyKerasMomentum ResourceApplyMomentum ResourceApplyPowerSign ResourceApplyProximalAdagrad
    ResourceApplyProximalGradientDescent ResourceApplyRMSProp ResourceCountUpTo ResourceGather
    ResourceGatherNd ResourceScatterAdd ResourceScatterDiv ResourceScatterMax ResourceScatterMin
    ResourceScatterMul ResourceScatterNdAdd ResourceScatterNdMax ResourceScatterNdMin
    ResourceScatterNdSub ResourceScatterNdUpdate ResourceScatterSub ResourceScatterUpdate
    ResourceSparseApplyAdadelta ResourceSparseApplyAdagrad ResourceSparseApplyAdagradDA
    ResourceSparseApplyAdagradV2 ResourceSparseApplyCenteredRMSProp ResourceSparseApplyFtrl
    ResourceSparseApplyFtrlV2 ResourceSparseApplyKerasMomentum ResourceSparseApplyMomentum
    ResourceSparseApplyProximalAdagrad ResourceSparseApplyProximalGradientDescent
    ResourceSparseApplyRMSProp ResourceStridedSliceAssign Reverse ReverseSequence ReverseV2 RightShift
    Rint RngReadAndSkip RngSkip Roll Round Rsqrt RsqrtGrad SampleDistortedBoundingBox
    SampleDistortedBoundingBoxV2 ScaleAndTranslate ScaleAndTranslateGrad ScatterAdd ScatterDiv
    ScatterMax ScatterMin ScatterMul ScatterNd ScatterNdAdd ScatterNdMax ScatterNdMin
    ScatterNdNonAliasingAdd ScatterNdSub ScatterNdUpdate ScatterSub ScatterUpdate SegmentMax
    SegmentMaxV2 SegmentMean SegmentMin SegmentMinV2 SegmentProd SegmentProdV2 SegmentSum SegmentSumV2
    Select SelectV2 SelfAdjointEig SelfAdjointEigV2 Selu SeluGrad SetSize Shape ShapeN Sigmoid
    SigmoidGrad Sign Sin Sinh Size Slice Snapshot SobolSample Softmax SoftmaxCrossEntropyWithLogits
    Softplus SoftplusGrad Softsign SoftsignGrad SpaceToBatchND SpaceToDepth SparseAdd SparseAddGrad
    SparseApplyAdadelta SparseApplyAdagrad SparseApplyAdagradDA SparseApplyAdagradV2
    SparseApplyCenteredRMSProp SparseApplyFtrl SparseApplyFtrlV2 SparseApplyMomentum
    SparseApplyProximalAdagrad SparseApplyProximalGradientDescent SparseApplyRMSProp SparseBincount
    SparseConcat SparseCountSparseOutput SparseCross SparseCrossHashed SparseCrossV2 SparseDenseCwiseAdd
    SparseDenseCwiseDiv SparseDenseCwiseMul SparseFillEmptyRows SparseFillEmptyRowsGrad SparseMatMul
    SparseMatrixAdd SparseMatrixMatMul SparseMatrixMul SparseMatrixNNZ SparseMatrixOrderingAMD
    SparseMatrixSoftmax SparseMatrixSoftmaxGrad SparseMatrixSparseCholesky SparseMatrixSparseMatMul
    SparseMatrixTranspose SparseMatrixZeros SparseReduceMax SparseReduceMaxSparse SparseReduceSum
    SparseReduceSumSparse SparseReorder SparseReshape SparseSegmentMean SparseSegmentMeanGrad
    SparseSegmentMeanGradV2 SparseSegmentMeanWithNumSegments SparseSegmentSqrtN SparseSegmentSqrtNGrad
    SparseSegmentSqrtNGradV2 SparseSegmentSqrtNWithNumSegments SparseSegmentSum SparseSegmentSumGrad
    SparseSegmentSumGradV2 SparseSegmentSumWithNumSegments SparseSlice SparseSliceGrad SparseSoftmax
    SparseSoftmaxCrossEntropyWithLogits SparseSparseMaximum SparseSparseMinimum SparseSplit
    SparseTensorDenseAdd SparseTensorDenseMatMul SparseTensorToCSRSparseMatrix SparseToDense
    SparseToSparseSetOperation Spence Split SplitV Sqrt SqrtGrad Square SquaredDifference Squeeze
    StatefulPartitionedCall StatefulRandomBinomial StatefulStandardNormal StatefulStandardNormalV2
    StatefulTruncatedNormal StatefulUniform StatefulUniformFullInt StatefulUniformInt StatelessCase
    StatelessIf StatelessMultinomial StatelessParameterizedTruncatedNormal StatelessRandomBinomial
    StatelessRandomGammaV2 StatelessRandomGammaV3 StatelessRandomGetAlg StatelessRandomGetKeyCounter
    StatelessRandomGetKeyCounterAlg StatelessRandomNormal StatelessRandomNormalV2 StatelessRandomPoisson
    StatelessRandomUniform StatelessRandomUniformFullInt StatelessRandomUniformFullIntV2
    StatelessRandomUniformInt StatelessRandomUniformIntV2 StatelessRandomUniformV2
    StatelessSampleDistortedBoundingBox StatelessShuffle StatelessTruncatedNormal
    StatelessTruncatedNormalV2 StatelessWhile StaticRegexFullMatch StaticRegexReplace
    StochasticCastToInt StopGradient StridedSlice StridedSliceAssign StridedSliceGrad StringFormat
    StringJoin StringLength StringLower StringNGrams StringSplit StringSplitV2 StringStrip
    StringToHashBucket StringToHashBucketFast StringToHashBucketStrong StringToNumber StringUpper Sub
    Substr Sum Svd Switch Tan Tanh TanhGrad TensorArray TensorArrayClose TensorArrayCloseV2
    TensorArrayCloseV3 TensorArrayConcat TensorArrayConcatV2 TensorArrayConcatV3 TensorArrayGather
    TensorArrayGatherV2 TensorArrayGatherV3 TensorArrayGrad TensorArrayGradV2 TensorArrayGradV3
    TensorArrayGradWithShape TensorArrayPack TensorArrayRead TensorArrayReadV2 TensorArrayReadV3
    TensorArrayScatter TensorArrayScatterV2 TensorArrayScatterV3 TensorArraySize TensorArraySizeV2
    TensorArraySizeV3 TensorArraySplit TensorArraySplitV2 TensorArraySplitV3 TensorArrayUnpack
    TensorArrayV2 TensorArrayV3 TensorArrayWrite TensorArrayWriteV2 TensorArrayWriteV3 TensorListConcat
    TensorListConcatLists TensorListConcatV2 TensorListElementShape TensorListFromTensor
    TensorListGather TensorListGetItem TensorListLength TensorListPopBack TensorListPushBack
    TensorListReserve TensorListResize TensorListScatter TensorListScatterIntoExistingList
    TensorListScatterV2 TensorListSetItem TensorListSplit TensorListStack TensorScatterAdd
    TensorScatterMax TensorScatterMin TensorScatterSub TensorScatterUpdate TensorStridedSliceUpdate
    ThreadUnsafeUnigramCandidateSampler Tile TileGrad Timestamp ToBool TopK TopKV2 Transpose
    TridiagonalMatMul TridiagonalSolve TruncateDiv TruncateMod TruncatedNormal UnicodeDecode
    UnicodeDecodeWithOffsets UnicodeEncode UnicodeScript UnicodeTranscode UniformCandidateSampler
    UniformDequantize UniformQuantize UniformQuantizedAdd UniformQuantizedClipByValue
    UniformQuantizedConvolution UniformQuantizedConvolutionHybrid UniformQuantizedDot
    UniformQuantizedDotHybrid UniformRequantize Unique UniqueV2 UniqueWithCounts UniqueWithCountsV2
    Unpack UnravelIndex UnsortedSegmentJoin UnsortedSegmentMax UnsortedSegmentMin UnsortedSegmentProd
    UnsortedSegmentSum UpperBound VarHandleOp VarIsInitializedOp Variable VariableShape VariableV2 Where
    While Xdivy Xlog1py Xlogy ZerosLike Zeta
"""

# Classes and functions of Keras 2 and 3 that compute from numbers and from words in the configuration. Left
# out are layers that hold code or load files (Lambda, TFSMLayer, TorchModuleWrapper, JaxLayer, FlaxLayer,
# DenseFeatures) and operations that take functions (Map, Scan, Cond).
_KERAS_CLASSES = """
    AUC AWQDTypePolicy AbsMaxQuantizer AbstractRNNCell Accuracy Activation ActivityRegularization
    Adadelta Adafactor Adagrad Adam AdamW Adamax AdaptiveAveragePooling1D AdaptiveAveragePooling2D
    AdaptiveAveragePooling3D AdaptiveMaxPooling1D AdaptiveMaxPooling2D AdaptiveMaxPooling3D Add
    AdditiveAttention AlphaDropout Attention AugMix AutoContrast Average AveragePooling1D
    AveragePooling2D AveragePooling3D AvgPool1D AvgPool2D AvgPool3D BatchNormalization Bidirectional
    BinaryAccuracy BinaryCrossentropy BinaryFocalCrossentropy BinaryIoU CTC CategoricalAccuracy
    CategoricalCrossentropy CategoricalFocalCrossentropy CategoricalGeneralizedCrossEntropy
    CategoricalHinge CategoryEncoding CenterCrop Circle Concatenate ConcordanceCorrelation Constant
    Constraint ContrastLimitedAdaptiveHistogramEqualization Conv1D Conv1DTranspose Conv2D
    Conv2DTranspose Conv3D Conv3DTranspose ConvLSTM1D ConvLSTM2D ConvLSTM3D Convolution1D
    Convolution1DTranspose Convolution2D Convolution2DTranspose Convolution3D Convolution3DTranspose
    CosineDecay CosineDecayRestarts CosineSimilarity Cropping1D Cropping2D Cropping3D CustomScaleLayer
    CutMix DTypePolicy DTypePolicyMap Dense DepthwiseConv1D DepthwiseConv2D Dice Discretization Dot
    Dropout ELU EinsumDense Embedding Equalization ExponentialDecay F1Score FBetaScore FalseNegatives
    FalsePositives Flatten Float8QuantizationConfig FloatDTypePolicy Ftrl Functional GPTQDTypePolicy GRU
    GRUCell GaussianDropout GaussianNoise GlobalAveragePooling1D GlobalAveragePooling2D
    GlobalAveragePooling3D GlobalAvgPool1D GlobalAvgPool2D GlobalAvgPool3D GlobalMaxPool1D
    GlobalMaxPool2D GlobalMaxPool3D GlobalMaxPooling1D GlobalMaxPooling2D GlobalMaxPooling3D
    GlorotNormal GlorotUniform GroupNormalization GroupQueryAttention HashedCrossing Hashing HeNormal
    HeUniform Hinge Huber Identity IdentityInitializer Initializer InputLayer Int4DTypePolicy
    Int4QuantizationConfig Int8QuantizationConfig IntegerLookup InverseTimeDecay IoU KLDivergence L1
    L1L2 L2 LSTM LSTMCell Lamb Layer LayerNormalization LeakyReLU LearningRateSchedule LecunNormal
    LecunUniform Lion LocallyConnected1D LocallyConnected2D LogCosh LogCoshError Loss
    LossFunctionWrapper LossScaleOptimizer Masking MaxNorm MaxNumBoundingBoxes MaxPool1D MaxPool2D
    MaxPool3D MaxPooling1D MaxPooling2D MaxPooling3D Maximum Mean MeanAbsoluteError
    MeanAbsolutePercentageError MeanIoU MeanMetricWrapper MeanRelativeError MeanSquaredError
    MeanSquaredLogarithmicError MeanTensor MelSpectrogram Metric MinMaxNorm Minimum MixUp Model
    MultiHeadAttention MultiOptimizer Multiply Muon Nadam NonNeg Normalization OneHotIoU OneHotMeanIoU
    Ones Optimizer OptimizerMap Orthogonal OrthogonalInitializer OrthogonalRegularizer PReLU
    PearsonCorrelation Permute PiecewiseConstantDecay Pipeline Poisson Policy PolynomialDecay Precision
    PrecisionAtRecall QuantizationConfig QuantizedDTypePolicy QuantizedFloat8DTypePolicy Quantizer
    R2Score RMSNormalization RMSprop RNN RadialConstraint RandAugment RandomBrightness
    RandomColorDegeneration RandomColorJitter RandomContrast RandomCrop RandomElasticTransform
    RandomErasing RandomFlip RandomFourierFeatures RandomGaussianBlur RandomGrayscale RandomHeight
    RandomHue RandomInvert RandomNormal RandomPerspective RandomPosterization RandomRotation
    RandomSaturation RandomSharpness RandomShear RandomTranslation RandomUniform RandomWidth RandomZoom
    ReLU Recall RecallAtPrecision Regularizer RepeatVector Rescaling Reshape Resizing
    ReversibleEmbedding RootMeanSquaredError SGD STFT STFTInitializer STFTSpectrogram ScheduleFreeAdamW
    SeedGenerator SensitivityAtSpecificity SeparableConv1D SeparableConv2D SeparableConvolution1D
    SeparableConvolution2D Sequential SharpnessAwareMinimization SimpleRNN SimpleRNNCell Softmax
    Solarization SparseCategoricalAccuracy SparseCategoricalCrossentropy SparseTopKCategoricalAccuracy
    SpatialDropout1D SpatialDropout2D SpatialDropout3D SpecificityAtSensitivity SpectralNormalization
    SquaredHinge StackedRNNCells StringLookup Subtract Sum SumOverBatchSizeMetricWrapper
    SyncBatchNormalization TextVectorization ThresholdedReLU TimeDistributed TopKCategoricalAccuracy
    TrueNegatives TruePositives TruncatedNormal Tversky UnitNorm UnitNormalization UpSampling1D
    UpSampling2D UpSampling3D VarianceScaling Wrapper ZeroPadding1D ZeroPadding2D ZeroPadding3D Zeros
    constant glorot_normal glorot_uniform he_normal he_uniform identity l1 l1_l2 l2 lecun_normal
    lecun_uniform max_norm min_max_norm non_neg ones orthogonal orthogonal_regularizer radial_constraint
    random_normal random_uniform stft truncated_normal unit_norm variance_scaling zeros
"""

_KERAS_OPERATIONS = """
    Abs Absolute AdaptiveAveragePool AdaptiveMaxPool AffineTransform All AllClose Amax Amin Angle Any
    Append Arange Arccos Arccosh Arcsin Arcsinh Arctan Arctan2 Arctanh Argmax Argmin Argpartition
    Argsort Array ArraySplit AveragePool BatchNorm Bincount BitwiseAnd BitwiseInvert BitwiseLeftShift
    BitwiseNot BitwiseOr BitwiseRightShift BitwiseXor BroadcastTo CDist CTCDecode CTCLoss Cast Cbrt Ceil
    Celu Cholesky CholeskyInverse Clip Conj Conjugate Conv ConvTranspose ConvertToTensor Copy Corrcoef
    Correlate Cos Cosh CountNonzero CropImages Cross Cumprod Cumsum Deg2rad DepthToSpace DepthwiseConv
    Det Diag Diagflat Diagonal Diff Digitize Divide DivideNoNan DotProductAttention Dsplit Dstack Eig
    Eigh Einsum ElasticTransform Elu EmptyLike Equal Erf Erfc Erfinv Exp Exp2 ExpandDims Expm1
    ExtractPatches ExtractSequences FFT FFT2 Fabs Flip Fliplr Flipud Floor FloorDivide Fmax Fmin Fmod
    Fold Full FullLike GaussianBlur Gcd Gelu Geomspace GetItem Glu Greater GreaterEqual HSVToRGB
    HardShrink HardSigmoid HardSilu HardTanh Heaviside Histogram Hsplit Hstack Hypot I0 IFFT2 IRFFT
    ISTFT Imag InTopK Inner Inv IsIn Isclose Isfinite Isinf Isnan Isneginf Isposinf Isreal Kron
    LayerNorm Lcm Ldexp LeakyRelu LeftShift Less LessEqual Linspace Log Log10 Log1p Log2 LogSigmoid
    LogSoftmax Logaddexp Logaddexp2 Logdet LogicalAnd LogicalNot LogicalOr LogicalXor Logspace Logsumexp
    Lstsq LuFactor MapCoordinates Matmul MatrixRank Max MaxPool Median Meshgrid Min Mod Moments Moveaxis
    MultiHot NanToNum Nanargmax Nanargmin Nancumprod Nancumsum Nanmax Nanmean Nanmedian Nanmin
    Nanpercentile Nanprod Nanquantile Nanstd Nansum Nanvar Ndim Negative Nextafter Nonzero Norm
    Normalize NotEqual OneHot OnesLike Outer PSNR Pad PadImages Percentile PerspectiveTransform Pinv
    Polar Power Prod Ptp Qr Quantile RFFT RGBToGrayscale RGBToHSV RMSNorm Rad2deg Ravel Real Rearrange
    Reciprocal Relu Relu6 Repeat Resize RightShift Roll Rot90 Round Rsqrt SSIM SVD SaturateCast
    ScaleAndTranslate Scatter ScatterUpdate SearchSorted SegmentMax SegmentMin SegmentProd
    SegmentReduction SegmentSum Select Selu SeparableConv Sigmoid Sign Signbit Silu Sin Sinc Sinh Size
    Slice SliceUpdate Slogdet SobelEdges SoftShrink Softplus Softsign Solve SolveTriangular Sort
    SpaceToDepth SparsePlus SparseSigmoid Sparsemax Split Sqrt Square Squareplus Squeeze Stack Std
    StopGradient Swapaxes Take TakeAlongAxis Tan Tanh TanhShrink Tensordot Threshold Tile TopK Trace
    Transpose Trapezoid Tril Triu TrueDivide Trunc Unfold Unique UnravelIndex Unstack Vander Var Vdot
    View ViewAsComplex ViewAsReal Vsplit Vstack Where ZerosLike
"""

_KERAS_FUNCTIONS = """
    BCE KLD MAE MAPE MSE MSLE acc accuracy bce binary_accuracy binary_crossentropy
    binary_focal_crossentropy categorical_accuracy categorical_crossentropy
    categorical_focal_crossentropy categorical_generalized_cross_entropy categorical_hinge ce celu
    circle concordance_correlation cosine_proximity cosine_similarity crossentropy ctc dice elu
    exponential gelu glu hard_shrink hard_sigmoid hard_silu hard_swish hard_tanh hinge huber
    kl_divergence kld kullback_leibler_divergence leaky_relu linear log_cosh log_sigmoid log_softmax
    logcosh mae mape mean_absolute_error mean_absolute_percentage_error mean_squared_error
    mean_squared_logarithmic_error mish mse msle pearson_correlation poisson relu relu6 selu sigmoid
    silu soft_shrink softmax softplus softsign sparse_categorical_accuracy
    sparse_categorical_crossentropy sparse_plus sparse_sigmoid sparse_top_k_categorical_accuracy
    sparsemax squared_hinge squareplus swish tanh tanh_shrink threshold top_k_categorical_accuracy
    tversky
"""

# Symbols of TensorFlow that a TFOpLambda layer of Keras 2 may call.
_KERAS_TF_SYMBOLS = """
    __operators__.add __operators__.eq __operators__.getitem __operators__.ne argsort broadcast_to cast
    clip_by_value compat.v1.concat compat.v1.gather compat.v1.shape compat.v1.squeeze
    compat.v1.transpose concat einsum expand_dims fill gather identity image.resize linalg.diag
    linalg.diag_part linalg.matmul linalg.norm math.abs math.add math.argmax math.argmin math.ceil
    math.cos math.cumsum math.divide math.equal math.erf math.exp math.floor math.floordiv math.greater
    math.greater_equal math.l2_normalize math.less math.less_equal math.log math.log1p math.logical_and
    math.logical_not math.logical_or math.maximum math.minimum math.mod math.multiply math.negative
    math.not_equal math.pow math.reduce_all math.reduce_any math.reduce_logsumexp math.reduce_max
    math.reduce_mean math.reduce_min math.reduce_prod math.reduce_std math.reduce_sum
    math.reduce_variance math.round math.rsqrt math.sigmoid math.sign math.sin math.sqrt math.square
    math.subtract math.tanh math.top_k math.truediv nn.bias_add nn.dropout nn.elu nn.gelu
    nn.l2_normalize nn.leaky_relu nn.log_softmax nn.relu nn.relu6 nn.selu nn.sigmoid nn.silu nn.softmax
    nn.softplus nn.swish nn.tanh one_hot ones ones_like pad range rank repeat reshape reverse roll shape
    size slice sort split squeeze stack stop_gradient strided_slice tensordot tile transpose unstack
    where zeros zeros_like
"""

# Estimators of scikit-learn that compute with numpy, which looks at every shape.
_SKLEARN_WITH_NUMPY = """
    ARDRegression AdaBoostClassifier AdaBoostRegressor BaggingClassifier BaggingRegressor
    BayesianGaussianMixture BayesianRidge BernoulliNB Binarizer CCA CalibratedClassifierCV CategoricalNB
    ClassifierChain ColumnTransformer ComplementNB DummyClassifier DummyRegressor ElasticNet
    ElasticNetCV EmpiricalCovariance FactorAnalysis FastICA FeatureUnion FixedThresholdClassifier
    FrozenEstimator FunctionTransformer GammaRegressor GaussianMixture GaussianNB
    GaussianProcessClassifier GaussianProcessRegressor GaussianRandomProjection GenericUnivariateSelect
    GridSearchCV HuberRegressor IncrementalPCA IsotonicRegression LabelBinarizer LabelEncoder Lars
    LarsCV Lasso LassoCV LassoLars LassoLarsCV LassoLarsIC LedoitWolf LinearDiscriminantAnalysis
    LinearRegression LinearSVC LinearSVR LogisticRegression LogisticRegressionCV MLPClassifier
    MLPRegressor MaxAbsScaler MinMaxScaler MissingIndicator MultiOutputClassifier MultiOutputRegressor
    MultiTaskElasticNet MultiTaskElasticNetCV MultiTaskLasso MultiTaskLassoCV MultinomialNB Normalizer
    OAS OneVsOneClassifier OneVsRestClassifier OrdinalEncoder OrthogonalMatchingPursuit
    OrthogonalMatchingPursuitCV PCA PLSCanonical PLSRegression PLSSVD PassiveAggressiveClassifier
    PassiveAggressiveRegressor Perceptron Pipeline PoissonRegressor PolynomialFeatures PowerTransformer
    QuadraticDiscriminantAnalysis QuantileRegressor QuantileTransformer RANSACRegressor RBFSampler RFE
    RFECV RandomizedSearchCV RegressorChain Ridge RidgeCV RidgeClassifier RidgeClassifierCV RobustScaler
    SGDClassifier SGDOneClassSVM SGDRegressor SelectFdr SelectFpr SelectFromModel SelectFwe SelectKBest
    SelectPercentile SelfTrainingClassifier SequentialFeatureSelector ShrunkCovariance SimpleImputer
    StackingClassifier StackingRegressor StandardScaler TargetEncoder TfidfTransformer TheilSenRegressor
    TransformedTargetRegressor TruncatedSVD TweedieRegressor VarianceThreshold VotingClassifier
    VotingRegressor
"""

TF_OPERATIONS = frozenset(_TF_OPERATIONS.split())
KERAS_CLASSES = frozenset([*_KERAS_CLASSES.split(), *_KERAS_OPERATIONS.split()])
KERAS_FUNCTIONS = frozenset(_KERAS_FUNCTIONS.split())
KERAS_TF_SYMBOLS = frozenset(_KERAS_TF_SYMBOLS.split())
SKLEARN_WITH_NUMPY = frozenset(_SKLEARN_WITH_NUMPY.split())
